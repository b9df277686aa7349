"""From the record to the paper's tables and figures, as one page and as text."""
