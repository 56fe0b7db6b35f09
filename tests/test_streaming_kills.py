"""S8: `kill -9` at random moments, five times; `make soak` does it a hundred times."""

from __future__ import annotations

import pytest
from kills import kill_pools, kill_servers
from serving import needs_server


@pytest.mark.parametrize("seed", range(5))
def test_s8_after_kill_9_every_stream_of_a_pool_goes_on_from_its_last_step(tmp_path, seed):
    assert kill_pools(tmp_path, seed, kills=2) > 20


@needs_server
@pytest.mark.parametrize("seed", range(5))
def test_s8_after_kill_9_clients_go_on_and_no_step_of_hundreds_is_taken_twice(tmp_path, seed):
    assert kill_servers(tmp_path, seed, kills=1) > 200
