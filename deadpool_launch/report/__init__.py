"""What a job did, from its journal: figures, pictures, a page."""
