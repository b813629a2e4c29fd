"""The checks, by what they are about: the runtime, the target, the host. Each is a function of params and facts."""
