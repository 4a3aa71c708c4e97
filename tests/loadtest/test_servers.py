"""Each server of the folder against the pages that it answers with."""

import math

import pytest

from loadtest.servers import UNKNOWN, Answers, ServerState, all_servers, find_server, label_of, parse_metrics

TIDEGATE = """
# HELP tidegate_kv_blocks KV blocks by state
# TYPE tidegate_kv_blocks gauge
tidegate_kv_blocks{state="free"} 60.0
tidegate_kv_blocks{state="held"} 30.0
tidegate_kv_blocks{state="evictable"} 10.0
tidegate_kv_waste_ratio 0.25
tidegate_prefix_query_tokens_total 1000.0
tidegate_prefix_hit_tokens_total 850.0
tidegate_worker_memory_bytes{kind="rss"} 9000.0
tidegate_worker_memory_bytes{kind="pss"} 8000.0
tidegate_packed_weight_bytes 5000.0
tidegate_kv_bytes 2000.0
"""
VLLM = """
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 400.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 600.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 300.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
"""
SGLANG = """
sglang:prompt_tokens_total{model_name="m"} 1000.0
sglang:cached_tokens_total{model_name="m"} 700.0
sglang:token_usage{model_name="m"} 0.5
"""

PAGES = {
    "tidegate": Answers(
        json={"/v1/models": {"data": [{"id": "m", "owned_by": "tidegate"}]}},
        metrics={'tidegate_build_info{version="0.1.0"}': 1.0},
    ),
    "vllm": Answers(
        json={"/v1/models": {"data": [{"id": "m", "owned_by": "vllm"}]}, "/version": {"version": "0.20"}},
        metrics=parse_metrics(VLLM),
    ),
    "sglang": Answers(
        json={
            "/v1/models": {"data": [{"id": "m", "owned_by": "sglang"}]},
            "/get_server_info": {
                "version": "0.6",
                "internal_states": [{"memory_usage": {"weight": 1.0, "kvcache": 2.0}}],
            },
        },
        metrics=parse_metrics(SGLANG),
    ),
    "llama.cpp": Answers(
        json={
            "/v1/models": {"data": [{"id": "m", "owned_by": "llamacpp"}]},
            "/props": {"default_generation_settings": {}, "build_info": "b7000"},
        }
    ),
}
NOTHING = [
    Answers(),
    Answers(json={"/v1/models": None, "/props": [], "/version": "x", "/server_info": 3}),
    Answers(json={"/v1/models": {"data": [None, 3, {"id": "m"}]}}, metrics={"process_cpu_seconds": math.nan}),
]


@pytest.mark.parametrize("server", all_servers(), ids=lambda server: server.name)
def test_a_server_knows_its_own_pages_and_no_others(server):
    assert server.name in PAGES, "a new server needs its pages here"
    assert {name for name, pages in PAGES.items() if server.recognises(pages)} == {server.name}
    assert find_server(PAGES[server.name]) is server


@pytest.mark.parametrize("server", [*all_servers(), UNKNOWN], ids=lambda server: server.name)
@pytest.mark.parametrize("answers", NOTHING)
def test_unknown_is_not_zero_where_a_server_tells_nothing(server, answers):
    assert server.state(answers) == ServerState()
    assert server.version(answers) is None


@pytest.mark.parametrize("server", all_servers(), ids=lambda server: server.name)
def test_state_is_read_from_the_pages_that_were_asked_for(server):
    assert set(server.state_paths) <= set(server.paths)


@pytest.mark.parametrize("answers", NOTHING)
def test_a_server_that_nobody_knows_is_unknown(answers):
    assert find_server(answers) is UNKNOWN


def test_versions_as_the_pages_say_them():
    versions = {server.name: server.version(PAGES[server.name]) for server in all_servers()}
    assert versions == {"tidegate": "0.1.0", "vllm": "0.20", "sglang": "0.6", "llama.cpp": "b7000"}


def test_tidegates_memory_is_split_by_blocks():
    answers = Answers(json=PAGES["tidegate"].json, metrics=parse_metrics(TIDEGATE))
    assert find_server(answers).state(answers) == ServerState(
        num_query_tokens=1000,
        num_hit_tokens=850,
        weights_bytes=5000,
        kv_pool_bytes=2000,
        kv_live_bytes=600,
        kv_cached_bytes=200,
        kv_live_token_bytes=450,
        server_bytes=9000,
    )


def test_vllms_counters_are_summed_over_its_engines():
    state = find_server(PAGES["vllm"]).state(PAGES["vllm"])
    assert (state.num_query_tokens, state.num_hit_tokens) == (1000, 300)
    assert state.kv_pool_bytes is None


def test_sglangs_memory_stands_on_its_info_page():
    state = find_server(PAGES["sglang"]).state(PAGES["sglang"])
    assert (state.weights_bytes, state.kv_pool_bytes, state.kv_live_bytes) == (1 << 30, 2 << 30, 1 << 30)
    assert state.num_hit_tokens == 700


def test_metrics_are_read_whatever_stands_in_their_labels():
    text = 'a 1\nb{x="}y",z="1 2"} 2.5 1700000000\n# HELP c\n\nnot a number x\nd +Inf\ne\n'
    assert parse_metrics(text) == {"a": 1.0, 'b{x="}y",z="1 2"}': 2.5, "d": math.inf}


def test_a_label_is_found_by_its_name():
    assert label_of('x{kind="rss",state="held"}', "state") == "held"
    assert label_of("x", "state") is None
