"""What only a running server shows: who answers, what its draft is fed, and whether it drafts what the files would."""
