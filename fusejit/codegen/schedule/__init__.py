"""What schedules are chosen by: the device, the cost model, registers, access patterns."""
