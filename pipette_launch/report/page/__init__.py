"""HTML page of a plan, which shows the choice and the reasons as drawings and tables, without network requests."""
