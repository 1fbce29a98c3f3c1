"""`arroyo-state gc`: delete unreferenced state, and report what was deleted. No rules of gc."""
