"""A Flower app: `task` says what is trained and on what, the other two are the halves of the federation."""
