"""Stage export_draft: the checkpoint form that SGLang loads."""
