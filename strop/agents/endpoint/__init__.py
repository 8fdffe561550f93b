"""An HTTP endpoint inside the trainer: any program that talks to a model API is an agent, and every call that
it makes is recorded token by token."""
