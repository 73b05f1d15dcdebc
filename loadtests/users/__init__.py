"""One file a dialect: how its clients ask and how its frames are read."""
