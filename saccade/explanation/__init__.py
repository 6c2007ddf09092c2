"""Explain a model by its tokens: hooks that record them, figures, and scores.

hooks     record traces and attention weights, scale single tokens
drawing   colours, overlays, alignment of maps with the image, figure sheets
figures   one module per figure of the papers, and the figures every family shares
scores    importance of tokens, and metrics on labelled images
adapters  the same for Quantus, Captum and pytorch-grad-cam
"""
