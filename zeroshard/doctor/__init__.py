"""`zeroshard doctor`: facts about this installation and this machine."""
