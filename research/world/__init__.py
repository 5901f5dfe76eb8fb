"""The tiny world to come, in which no panel's text names a look: artwork, prompts, oracle, and its makers.

Tried so far: the oracle reads every drawn panel of 16 to 192 px, and the autoencoder's reconstructions of 32 px and
more, without an error. `judge` is right on 255 of 256 questions about one look and on 245 of 256 about pairs, on 66 %
of those about poses and 84 % of those about texts, for which its training goes on. It did not start from scratch: the
weights of `pacorl.tiny`'s judge, which can compare two panels, were given a new vocabulary; from scratch 3,300 steps
taught it to name every look and not to compare them. The generator is half-way: its sheets of 32 px
are valid (0.98) in the place that the theme names, and share colour, hat and palette (κ 0.8, 0.7, 1.0), shape less
(0.3); panels follow the pose of their text in two of three cases, and the prop not yet. Its T5 had learned no places in
5,600 steps, and could not learn them any more: a fresh one was trained on the old one's codes and `PanelOfWord`, which
is now a task from the first step. Panels of 64 px are blurs. `pacorl.tiny` is the world in use.
"""
