"""`fedsir audit`: a consortium's own sites, an HTML page and a worklist for graders."""
