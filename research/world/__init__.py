"""The tiny world to come, in which no panel's text names a look: drawing, prompts, oracle, and its makers.

Tried so far: the oracle reads every drawn panel of 16 to 96 px, and the autoencoder's reconstructions of 32 px and
more, without an error. Generator and judge are not trained yet; `pacorl.tiny` is the world in use.
"""
