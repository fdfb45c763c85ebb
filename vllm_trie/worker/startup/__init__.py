"""What happens before an engine serves: memory is measured, kernels are compiled, graphs are captured."""
