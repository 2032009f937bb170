"""What a few training steps do, seen from outside: the events that an audit judges."""
