"""The decisions of a job: one pure state machine and the driver that acts on them."""
