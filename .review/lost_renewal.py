import asyncio
from typing import Any
from llm42.protocol import Commit
from tests.service.stand_ins import until
from tests.service.test_exchange import both, window_of

async def test_lost_renewal_and_a_window() -> None:
    async with both(interval_s=0.001) as made:
        v = made.verifier
        made.exchange.follow(window_of("a", credit=5000, max_len=9000), lambda _: None)
        await until(lambda: bool(v.requests))
        real = type(v).renew
        def renew(request_id, until_, told):   # as Followers.renew: one that was stopped is not known
            if request_id in v.stopped: told(False)
            else: real(v, request_id, until_, told)
        v.renew = renew
        v.held = True
        pass
        made.exchange.renew("a", 4000)
        await until(lambda: bool(made.transport.calls[-1].renewals)); up = made.transport.calls[-1]
        pass
        heard = list[Any]()
        made.exchange.stop("a")
        made.exchange.follow(window_of("a"), heard.append)
        made.exchange._repeat(up, RuntimeError("lost"))
        try:
            await asyncio.wait_for(until(lambda: bool(heard)), 3)
        except TimeoutError: pass
        print("the window's answer:", heard)
