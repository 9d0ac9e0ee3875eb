"""What one training step costs, counted without a GPU: launches, casts, bytes, bytes saved for backward.

    python -m fxamp.counting                 # every model of the zoo, at published sizes, on fake CUDA tensors

`count(make_step, way)` counts a model of your own.
"""
