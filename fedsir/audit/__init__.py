"""Which sites of a consortium deserve a second look at their labels, judged without any ground truth."""
