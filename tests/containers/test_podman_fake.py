"""The runtime in memory keeps the contract of a runtime, so that tests of sessions on it mean something."""

import pytest
from fakes_runtime import CONTRACT, KILLED, Call, MemoryRuntime, MemoryRuntimes, at_once

from polarnode.core.errors import RuntimeFault
from polarnode.core.ports import Runtime
from polarnode.core.task import RuntimeSpec


@pytest.mark.parametrize("assertions", CONTRACT, ids=lambda each: each.__name__.removeprefix("contract_"))
async def test_fake_keeps_runtime_contract(assertions) -> None:  # type: ignore[no-untyped-def]
    runtime = MemoryRuntime()
    await assertions(runtime)
    await runtime.close()


async def test_fake_runs_given_programs() -> None:
    def harness(call: Call) -> int:
        call.stdout += call.env["KEY"].encode()
        return 7

    runtimes = MemoryRuntimes(programs={"pi": at_once(harness)})
    async with runtimes.open(RuntimeSpec(), session_id="s", lifetime_s=1.0) as runtime:
        as_port: Runtime = runtime
        ended = await as_port.run(["pi"], env={"KEY": "k"})
        assert (ended.exit_code, ended.stdout) == (7, b"k")
        assert runtimes.statistics().live == 1
    assert runtimes.statistics().live == 0
    with pytest.raises(RuntimeFault, match="ended"):
        await runtime.run(["pi"])
    assert KILLED == 137


async def test_fake_openings_can_fail() -> None:
    runtimes = MemoryRuntimes(faults=[RuntimeFault("no")])
    with pytest.raises(RuntimeFault, match="no"):
        async with runtimes.open(RuntimeSpec(), session_id="s", lifetime_s=1.0):
            pass
    async with runtimes.open(RuntimeSpec(), session_id="s", lifetime_s=1.0) as runtime:
        assert runtime.alive
