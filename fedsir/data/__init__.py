"""Images from every source as uint8 arrays with labels and patients; see README.md here."""
