"""Takes what a stage logs; MLflow has tests of its own."""


class SilentTracker:
    def log_metrics(self, metrics, step=None):
        pass

    def log_artifact(self, path):
        assert path.exists()

    def log_table(self, columns, name):
        pass
