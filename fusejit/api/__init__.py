"""What a user calls: jit, trace, transforms, control flow, and the objects that they return."""
