"""Every way to train side by side on a GPU: time, memory, launches, and what limits them. `tools/gpu_speed` runs it."""
