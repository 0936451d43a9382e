"""Simulated vLLM workers: the fleet behind ``coordinator demo``, and the fixture of the flow tests.

They speak the protocol of vLLM 0.33.0 strictly, from what real servers answered, and share no code with
``envelope``: a mistake there does not meet its mirror image here.

=====================  ======================================================================================
``fleet``, ``worker``  the servers: sockets, routes, what they received
``writer``, ``faults`` how an answer is written, and everything that can go wrong with that
``render``, ``generate``, ``chat``, ``completions``, ``responses``, ``messages``, ``probes``  the routes
``prompts``, ``conversations``  an OpenAI request -> token ids and sampling parameters
``schema``, ``generate_request``, ``sampling``, ``refusals``  what is refused, in vLLM's words
``core``, ``handover``, ``encodings``  admission, pacing, aborts; KV blocks that one worker leaves and another reads
                       once, embeddings that any may read
``pairs``, ``bootstrap``  legs that meet while both are in flight: Mooncake's transfers, SGLang's rooms
``media``, ``features``  pictures, sound and video in prompts
``engine``, ``replies``, ``tokenizer``, ``logprobs``, ``parsers``, ``stream_parser``  the model and its text
=====================  ======================================================================================

Needs the ``demo`` extra: ``pip install 'pd-coordinator[demo]'``.
"""

from coordinator.sim.answers import Received
from coordinator.sim.encodings import EncodingStore, EncodingViolation
from coordinator.sim.faults import ABSENT, Behaviour, Canned, Fault
from coordinator.sim.fleet import SimFleet
from coordinator.sim.handover import HandoverStore, Violation
from coordinator.sim.pairs import PairStore
from coordinator.sim.settings import Settings
from coordinator.sim.worker import SimWorker

__all__ = [
    "ABSENT",
    "Behaviour",
    "Canned",
    "EncodingStore",
    "EncodingViolation",
    "Fault",
    "HandoverStore",
    "PairStore",
    "Received",
    "Settings",
    "SimFleet",
    "SimWorker",
    "Violation",
]
