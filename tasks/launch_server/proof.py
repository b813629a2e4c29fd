"""What the launched server is held against: the run's own export, target and dump."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tasks.common.draft_checks.subject import Subject
from tasks.common.draft_files import DraftFiles
from tasks.common.draft_form import Draft
from tasks.common.draft_trace import DraftTrace
from tasks.common.hidden_states import HiddenStates
from tasks.common.live_checks.dumped import dumped_prompts, dumped_references
from tasks.common.live_checks.interview import Answer
from tasks.common.live_checks.run import Expected, Material
from tasks.common.live_checks.slots import Reference, named_states
from tasks.common.params import Params
from tasks.common.served_draft import served_vocab_map
from tasks.common.server_plan import ServerPlan
from tasks.common.server_session import LOGS
from tasks.common.speculative_plan import EXPORT
from tasks.common.target import TargetShape, load_config, load_model, load_tokenizer, model_folder
from tasks.common.target_weights import TargetWeights
from tasks.launch_server.report import served_limit


@dataclass(frozen=True)
class Proof:
    """A plan with all that its server must agree with.

    Attributes:
        plan: of the server, with the flags that let it be looked into.
    """

    params: Params
    plan: ServerPlan
    subject: Subject
    material: Material

    @classmethod
    def of(cls, params: Params, plan: ServerPlan, states: HiddenStates) -> "Proof":
        """Choose held-out prompts, and run the target over them before the server needs the room."""
        prompts = dumped_prompts(states)
        model = load_model(params.target)
        named = {prompt.id: named_states(model, torch.tensor(prompt.token_ids)) for prompt in prompts}
        del model
        torch.cuda.empty_cache()  # does nothing without a GPU

        def references(answers: Sequence[Answer]) -> tuple[list[Reference], str]:
            return dumped_references(states, answers, named), ""

        draft = Draft.of(DraftFiles.open(EXPORT), states.contract.architecture)
        trace = DraftTrace(LOGS / "draft_trace.jsonl", served_vocab_map(draft).target_ids.tolist())
        traced = plan.adding(trace.flags, trace.environment)
        material = Material(
            prompts, references, TargetWeights(model_folder(params.target)), load_tokenizer().decode, trace
        )
        shape = TargetShape.of(load_config())
        subject = Subject(draft, shape, contract=states.contract, contract_from=str(states.folder))
        return cls(params, traced, subject, material)

    def expected(self, nonce: str) -> Expected:
        """What the server must say of itself.

        Args:
            nonce: the weight version that it was started with.
        """
        plan = self.plan
        return Expected(
            served={
                "model_path": str(plan.target),
                "speculative_algorithm": plan.algorithm,
                "speculative_draft_model_path": str(plan.draft),
                "dtype": plan.dtype,
            },
            planned=True,
            nonce=nonce,
            max_relative_error=served_limit(self.params),
            gated=True,
            exact=plan.dtype == "float32",
        )
