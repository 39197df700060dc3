"""EC2: spot interruptions, Auto Scaling, rebalance recommendations, through the metadata service in its
version 2 (IMDSv2).

EC2 sends no signals. A spot interruption is announced two minutes ahead, on a best-effort basis, and Amazon
recommends polling every 5 seconds; a hibernation begins at once.
"""

from __future__ import annotations

from lastcall import clock as clocks
from lastcall.notices import polling
from lastcall.notices.cloud.client import HttpAnswer
from lastcall.notices.cloud.metadata import PROBE_SECONDS, Metadata
from lastcall.notices.polling import Trouble, log

BASE = "http://169.254.169.254"
BASE_IPV6 = "http://[fd00:ec2::254]"

_TOKEN = "/latest/api/token"
_TOKEN_SECONDS = 21600  # six hours, the maximum
_SPOT = "/latest/meta-data/spot/instance-action"
_SPOT_LEAD = 120.0
_ACTIONS = ("terminate", "stop", "hibernate")
_LIFECYCLE = "/latest/meta-data/autoscaling/target-lifecycle-state"
_OUT_OF_SERVICE = ("Terminated", "Warmed:Terminated", "Warmed:Stopped", "Warmed:Hibernated")
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


class Aws(Metadata):
    name = "aws"
    title = "The EC2 metadata service"
    interval = 5.0

    def __init__(
        self, base: str = BASE, *, rebalance: bool = False, clock: clocks.Clock | None = None
    ) -> None:
        super().__init__(base, clock)
        self._rebalance = rebalance
        self._token: str | None = None

    def look(self) -> float:
        self._look_for_interruption()
        self._look_for_scaling()
        self._look_for_rebalance()
        return self.interval

    def ask_who(self) -> bool:
        self._token = self._new_token(PROBE_SECONDS)
        return True

    def _look_for_interruption(self) -> None:
        answer = self._get(_SPOT)
        if answer is None:
            return
        body = answer.mapping()
        action, time = body.get("action"), body.get("time")
        if action not in _ACTIONS:
            raise Trouble(
                "garbage", f"announced an unknown spot action, not one of {', '.join(_ACTIONS)}: {action!r}"
            )
        if not self.new((action, str(time))):
            return
        moment = polling.instant(time)
        if moment is None:
            self.warn("time", "%s announced a spot interruption with an invalid time: %r", self.title, time)
            self.tell(f"EC2 spot interruption ({action})", None)
            return
        # A time further ahead than two minutes means that the clock of this machine is wrong.
        deadline = min(polling.monotonic(self.clock, moment), self.clock.now() + _SPOT_LEAD)
        self.tell(f"EC2 spot interruption ({action} at {time})", deadline)

    def _look_for_scaling(self) -> None:
        """Only the group's lifecycle hook knows how long there is then: no deadline, so the configured grace
        applies."""
        answer = self._get(_LIFECYCLE)
        state = answer.text() if answer is not None else ""
        if state in _OUT_OF_SERVICE and self.new(state):
            self.tell(f"EC2 Auto Scaling takes this instance out of service (target state {state})", None)

    def _look_for_rebalance(self) -> None:
        """An elevated risk, often hours before an interruption that may never come: stopping for it is a
        choice."""
        answer = self._get(_REBALANCE)
        if answer is None:
            return
        time = str(answer.mapping().get("noticeTime"))
        if not self.new(("rebalance", time)):
            return
        if self._rebalance:
            self.tell(f"EC2 rebalance recommendation of {time}", None)
        else:
            log.info(
                "EC2 recommends to move away from this instance (rebalance, %s). To stop for this: "
                "LASTCALL_AWS_REBALANCE=1",
                time,
            )

    def _get(self, path: str) -> HttpAnswer | None:
        """None if there is nothing of that name (404), which means no news."""
        if self._token is None:
            self._token = self._new_token()
        answer = self._ask(path, self._token)
        if answer.status == 401:  # it has expired
            self._token = None
            self._token = self._new_token()
            answer = self._ask(path, self._token)
        return None if answer.status == 404 else answer.expect()

    def _ask(self, path: str, token: str) -> HttpAnswer:
        return self.client.request("GET", path, {"X-aws-ec2-metadata-token": token})

    def _new_token(self, seconds: float | None = None) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
        try:
            token = self.client.request("PUT", _TOKEN, headers, seconds=seconds).expect().text()
        except Trouble as error:
            if error.kind != "silent":
                raise
            # The answer to this one question may travel a limited number of hops, by default one: too few for
            # a container.
            raise Trouble(
                "silent",
                f"{error}. In a container, allow it a second hop: aws ec2 modify-instance-metadata-options "
                "--instance-id ID --http-put-response-hop-limit 2",
            ) from None
        if not (token.isascii() and token.isprintable() and 0 < len(token) <= 4096):
            raise Trouble("garbage", "returned an invalid token")
        return token
