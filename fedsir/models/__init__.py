"""Networks, their first weights, and weights as flat vectors."""
