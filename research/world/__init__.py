"""The tiny world to come, in which no panel's text names a look: artwork, prompts, oracle, and its makers.

The committed weights were made on a longer way than the makers go now, and taught them their lessons. The judge did not
learn from scratch to compare two panels: the weights of an earlier judge were given a new vocabulary. The generator
did not learn which of four texts is a panel's own in 7,000 steps; `attention_loss` taught it in 400.
"""
