"""Where Prefect's settings come from in this checkout: not from the person's own profiles."""

import os
import subprocess
import sys

from tests.flows.toy_project import REPOSITORY

SHOW = "from prefect.settings import get_current_settings as s; print(s().api.url, s().server.ephemeral.enabled)"


def test_the_active_profile_of_the_home_is_not_read_and_an_exported_api_url_is(tmp_path):
    (tmp_path / ".prefect").mkdir()
    (tmp_path / ".prefect" / "profiles.toml").write_text(
        'active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "http://127.0.0.1:9/api"\n'
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}

    def settings(folder, **more: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", SHOW],
            cwd=folder,
            env={**environment, "HOME": str(tmp_path), **more},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    assert settings(tmp_path).startswith("http://127.0.0.1:9/api")  # as Prefect does elsewhere
    assert settings(REPOSITORY) == "None True"
    assert settings(REPOSITORY, PREFECT_API_URL="http://127.0.0.1:8/api").startswith("http://127.0.0.1:8/api")
