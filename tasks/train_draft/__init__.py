"""Stage train_draft: EAGLE-3 with test-time training, chosen by predicted acceptance length."""
