"""Built models by our kernels beside the same by Megatron's modules, and why they fall back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn

from tests.helpers import te_stand_in
from tests.helpers.built_model import (
    LORAS,
    PACKINGS,
    fill_bank,
    largest_error,
    packed_batch,
    run_packed,
    whole_gradients,
)
from tests.helpers.user_models import SPEC, build_user_gpt
from tlora_megatron.integrations.megatron import engine as recompute
from tlora_megatron.integrations.megatron import nano_batches
from tlora_megatron.integrations.megatron.built.head import Targets, use_targets
from tlora_megatron.integrations.megatron.built.model import (
    discover,
    freeze,
    install_packed_attention,
)
from tlora_megatron.integrations.megatron.built.own_compute import (
    OwnCompute,
    _spans,
    use_own_compute,
)
from tlora_megatron.integrations.megatron.layer import conditions, frozen_sublayer, plain_layer
from tlora_megatron.integrations.megatron.layer import modules as module_hooks
from tlora_megatron.integrations.megatron.layer.modules import built_class, foreign_hook
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import (
    built_head_norms,
    built_norm,
    why_not_head_norms,
)
from tlora_megatron.layers import transformer_engine
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.ops.routing import use_micro_batch
from tlora_megatron.parallel.groups import ParallelGroups

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is about the CPU")
NUM_LAYERS = SPEC.num_layers
Results = tuple[list[Tensor], list[dict[str, Tensor]]]


class Case:
    """A built model with adapters.

    Args:
        change: is given the model before anything is decided.
    """

    def __init__(
        self,
        groups: ParallelGroups,
        *,
        own: bool = True,
        vocab_size: int = SPEC.vocab_size,
        change: Callable[[Any], Any] = lambda model: None,
        **options: Any,
    ) -> None:
        self.groups = groups
        self.chunks = build_user_gpt(torch_norms=True, **options)
        self.model: Any = self.chunks[0]
        freeze(self.chunks)
        recompute.install()
        install_packed_attention(self.chunks)
        linears = discover(self.chunks, SPEC, groups)
        change(self.model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TLORA_FLAG_COMPUTE", "own" if own else "modules")
            self.compute: OwnCompute = use_own_compute(self.chunks, linears, groups, vocab_size)
        sites = [site for site, _ in linears]
        dtype = self.model.config.params_dtype
        self.bank = AdapterBank(sites, LORAS, dtype=dtype, device=groups.device)
        attach(linears, self.bank)
        fill_bank(self.bank)

    def results(self) -> Results:
        losses = run_packed(self.chunks, self.groups, compute=self.compute)
        gradients = whole_gradients(self.bank, self.groups)
        for adapter in self.bank.adapters:
            adapter.slab.zero_grad()
        used = [packed_batch(i).weights > 0 for i in range(len(losses))]
        return [x[rows] for x, rows in zip(losses, used, strict=True)], gradients


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines of this package in the log; newer releases of Megatron's warn of their own."""
    return [r.message for r in caplog.records if r.name.startswith("tlora_megatron")]


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=3e-6, atol=3e-6)


def assert_same(actual: Results, expected: Results) -> None:
    close(actual[0], expected[0])
    error, name = largest_error(actual[1], expected[1])
    assert error < 1e-5, name


@pytest.fixture
def num_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each layer that ran by our kernels."""
    runs: list[int] = []
    run = plain_layer.run_layer

    def counted(*args: Any) -> Tensor:
        runs.append(1)
        return run(*args)

    monkeypatch.setattr(plain_layer, "run_layer", counted)
    return runs


@pytest.mark.parametrize(
    "options",
    [
        {"add_qkv_bias": True},
        {"te": True, "add_qkv_bias": True},
        {"te": True, "layernorm_zero_centered_gamma": True},
        {"qk_layernorm": True},
    ],
    ids=["local", "Transformer Engine", "norms less one", "normed heads"],
)
def test_kernels_compute_what_modules_do(
    options: dict[str, Any], groups: ParallelGroups, num_run: list[int]
) -> None:
    modules = Case(groups, own=False, **options).results()
    assert not num_run
    case = Case(groups, **options)
    assert_same(case.results(), modules)
    assert len(num_run) == NUM_LAYERS * len(PACKINGS)
    assert case.compute.line == "base: 4 of 4 layers by our kernels, head by ours"
    assert case.compute.summary() == {
        "layers": {"own": 4, "halves": 0, "modules": 0},
        "head": "own",
        "reasons": [],
    }


def test_products_that_are_transformer_engine_s(
    groups: ParallelGroups, num_run: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base that Transformer Engine quantises has no codes that a norm could prepare; its FP8 is a
    stand-in whose values are exact, so it cannot show anything about rounding."""
    case = Case(groups, te=True, add_qkv_bias=True)
    expected, engine = case.results(), te_stand_in.Engine()
    monkeypatch.setattr(transformer_engine, "_engine", lambda: engine)
    monkeypatch.setattr(case.model.config, "fp8", "hybrid")
    monkeypatch.setattr(case.model.config, "fp8_recipe", "tensorwise")
    num_run.clear()
    assert_same(case.results(), expected)
    assert len(num_run) == NUM_LAYERS * len(PACKINGS)
    assert engine.weights_quantised == 4 * NUM_LAYERS, "once each"


def test_a_base_that_is_scored_before_it_has_adapters(
    groups: ParallelGroups, num_run: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """The check of a fingerprint scores the base so."""
    chunks = build_user_gpt(torch_norms=True, te=True)
    install_packed_attention(chunks)
    batch, linears = packed_batch(0), discover(chunks, SPEC, groups)
    args = (batch.tokens[None], None, None)
    with use_micro_batch(batch.view), torch.no_grad():
        expected = chunks[0](*args)
        compute = use_own_compute(chunks, linears, groups, SPEC.vocab_size)
        assert torch.equal(chunks[0](*args), expected)
    assert (compute.layers.own, num_run, compute.late.found, told(caplog)) == (4, [], [], [])


@pytest.mark.slow
@pytest.mark.parametrize("modules", [["layernorm"], ["layernorm", "mlp"]], ids="+".join)
def test_norms_that_run_again(
    modules: list[str], groups: ParallelGroups, num_run: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit what they give once, and until then nobody holds their output."""
    expected = Case(groups).results()
    case = Case(groups, recompute_granularity="selective", recompute_modules=modules)
    inputs: list[Tensor] = []
    sizes: list[int] = []
    run = frozen_sublayer._run_whole

    def run_whole(*args: Any) -> Tensor:
        out = run(*args)
        sizes.extend(x.untyped_storage().size() for x in inputs[-2:])
        return out

    def product_vjp(self: Any, x: Tensor, *args: Any) -> Any:
        inputs.append(x)
        return product(self, x, *args)

    linear = type(case.model.decoder.layers[0].mlp.linear_fc1)
    product = linear.product_vjp
    monkeypatch.setattr(linear, "product_vjp", product_vjp)
    monkeypatch.setattr(frozen_sublayer, "_run_whole", run_whole)
    actual = case.results()
    assert len(num_run) == 2 * NUM_LAYERS * len(PACKINGS)
    assert sizes == [0] * len(sizes)
    assert nano_batches._why_not_layers(case.model) == "layer 0: its norms are recomputed"
    assert all(torch.equal(*pair) for pair in zip(actual[0], expected[0], strict=True))
    for ours, theirs in zip(actual[1], expected[1], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert_same(actual, Case(groups, own=False).results())


class NarrowNorm(nn.RMSNorm):
    """Transformer Engine's: gives rows of its weight's dtype."""

    seen: set[torch.dtype]
    """Dtypes of the residual streams."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(x.dtype)
        return super().forward(x.to(self.weight.dtype))


@pytest.mark.slow
def test_an_fp32_residual_stream(
    groups: ParallelGroups, num_run: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Around layers in bf16: own kernels, and Transformer Engine's modules, beside all in fp32."""

    def change(model: Any) -> None:
        final = NarrowNorm(SPEC.hidden_size, SPEC.norm_eps, dtype=model.config.params_dtype)
        final.seen = set()
        final.load_state_dict(model.decoder.final_layernorm.state_dict())
        model.decoder.final_layernorm = final.requires_grad_(False)
        for weight in model.parameters():
            weight.data = weight.bfloat16().to(weight.dtype)

    exact = Case(groups, change=change, te=True).results()
    # The installed release rounds it; ours go the newer ones' way.
    monkeypatch.setattr(conditions, "_sums_in_fp32", lambda: True)
    half: Any = {"params_dtype": torch.bfloat16, "bf16": True, "fp32_residual_connection": True}
    for own in (True, False):
        num_run.clear()
        case = Case(groups, change=change, te=True, own=own, **half)
        losses, gradients = case.results()
        if own:
            assert case.compute.line == "base: 4 of 4 layers by our kernels, head by ours"
            assert len(num_run) == NUM_LAYERS * len(PACKINGS)
            assert "fp32_residual_conn" in str(nano_batches._why_not_config(case.model))
            assert case.model.decoder.final_layernorm.seen == {torch.float32}
        torch.testing.assert_close(losses, exact[0], rtol=2e-2, atol=2e-2)
        error, name = largest_error(gradients, exact[1])
        assert error < 0.1, name


def test_the_model_s_names_and_shards_stay(groups: ParallelGroups) -> None:
    def described(model: Any) -> Any:
        sharded = model.sharded_state_dict()
        return (
            [(name, tuple(x.shape)) for name, x in model.named_parameters()],
            [name for name, _ in model.named_modules()],
            list(model.state_dict()),
            {name: getattr(x, "global_shape", None) for name, x in sharded.items()},
        )

    modules, own = Case(groups, own=False).model, Case(groups).model
    assert described(own) == described(modules)
    assert isinstance(own.decoder.layers[0], built_class(modules.decoder.layers[0]))


def test_weights_that_are_loaded_later_are_used(groups: ParallelGroups) -> None:
    modules, own = (Case(groups, own=own, qk_layernorm=True) for own in (False, True))
    state = {key: x * 1.1 for key, x in own.model.state_dict().items() if x is not None}
    modules.model.load_state_dict(state, strict=False)
    own.model.load_state_dict(state, strict=False, assign=True)
    assert_same(own.results(), modules.results())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"qk_l2_norm": True}, "qk_l2_norm is True: our kernels do not compute it yet"),
        ({"fp32_residual_connection": True}, "linears of the local spec take no fp32 rows"),
        ({"fp32_residual_connection": True, "te": True}, "megatron-core rounds the residual"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_for_modules(options: dict[str, Any], reason: str, groups: ParallelGroups) -> None:
    case = Case(groups, **options)
    assert case.compute.layers.own == 0
    assert reason in case.compute.line


@pytest.mark.slow
def test_a_hook_that_comes_later_is_called_and_told_once(
    groups: ParallelGroups, num_run: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    case, seen = Case(groups), []
    expected = case.results()
    num_batches = len(PACKINGS)

    def hook_of_a_user(*_: Any) -> None:
        seen.append(1)

    num_run.clear()
    with caplog.at_level(logging.WARNING):
        handle = case.model.decoder.layers[2].mlp.linear_fc1.register_forward_hook(hook_of_a_user)
        assert_same(case.results(), expected)
        assert_same(case.results(), expected)
    assert len(seen) == 2 * num_batches
    assert len(num_run) == 2 * num_batches * NUM_LAYERS, "attention is by our kernels still"
    (line,) = told(caplog)
    assert line.startswith("layer 2 runs its MLP by Megatron's modules: the hook test_a_hook")
    assert line.endswith("hook_of_a_user waits for ColumnParallelLinear")
    assert case.compute.summary()["reasons"] == [line.partition("modules: ")[2]]
    handle.remove()
    num_run.clear()
    assert_same(case.results(), expected)
    assert len(num_run) == num_batches * NUM_LAYERS


def test_the_hooks_of_megatron_s_ddp_do_not_count(groups: ParallelGroups) -> None:
    """It puts one on every module under `--overlap-param-gather`."""

    case, theirs = Case(groups), object.__new__(DistributedDataParallel)
    nn.Module.__init__(theirs)
    theirs.use_forward_hook = True
    hook = theirs._make_forward_pre_hook()
    for module in case.model.modules():
        module.register_forward_pre_hook(hook, prepend=True)
        assert module_hooks.hangs_on(module) == (foreign_hook(module._forward_hooks) is not None)
    assert foreign_hook({0: hook}) is None
    assert foreign_hook({0: hook, 1: print}) is print
    with use_micro_batch(packed_batch(0).view):
        assert all(layer.direct_sublayers for layer in case.model.decoder.layers)


def test_another_argument_runs_the_modules(groups: ParallelGroups, num_run: list[int]) -> None:
    case = Case(groups)
    layer, batch = case.model.decoder.layers[0], packed_batch(0)
    with use_micro_batch(batch.view), torch.no_grad():
        angles = case.model.rotary_pos_emb(32)
        hidden = torch.randn(32, 1, SPEC.hidden_size)
        own = layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles)[0]
        assert len(num_run) == 1
        other = layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles * 1)[0]
    assert len(num_run) == 2, "the MLP is by our kernels still"
    close(own, other)
    assert case.compute.late.found == ["it is given other rotary_pos_emb than the micro-batch's"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_targets", [0, 5])
def test_the_head_alone(num_targets: int, tied: bool, groups: ParallelGroups) -> None:
    vocab_size = SPEC.vocab_size - 7  # further columns are padding
    case = Case(groups, vocab_size=vocab_size)
    if tied:
        case.model.share_embeddings_and_output_weights = True
        case.model.output_layer.weight = None
    batch = packed_batch(0)
    rows, labels = torch.arange(num_targets) * 3, batch.labels % vocab_size
    args = (batch.tokens[None], None, None)
    with use_micro_batch(batch.view), torch.no_grad():
        logits = case.model(*args)[0][:, :vocab_size]
        expected = nn.functional.cross_entropy(logits[rows], labels[rows], reduction="none")
        with use_targets(Targets(rows, labels, scores=True)):
            losses, right = case.model(*args)[0].unbind(-1)
    with use_micro_batch(batch.view), use_targets(Targets(rows, labels, scores=False)):
        (same,) = case.model(*args, labels=labels[None])
        same.sum().backward()
    close(losses[rows], expected)
    close(same.detach(), losses)
    assert torch.equal(right[rows] > 0, logits[rows].argmax(-1) == labels[rows])
    assert losses.count_nonzero() == num_targets
    assert any(a.slab.grad.any() for a in case.bank.adapters) == (num_targets > 0)


def test_a_head_that_is_not_plain(groups: ParallelGroups) -> None:
    def change(model: Any) -> None:
        model.fp16_lm_cross_entropy = True

    case = Case(groups, change=change)
    assert case.compute.head is None
    assert "head by Megatron's; head by Megatron's modules" in case.compute.line
    assert "fp16_lm_cross_entropy is True" in case.compute.line
    assert case.compute.summary()["head"] == "modules"


def test_another_choice_is_refused(groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLORA_FLAG_COMPUTE", "ours")
    with pytest.raises(ValueError, match="TLORA_FLAG_COMPUTE must be own or modules, got ours"):
        use_own_compute([], [], groups, SPEC.vocab_size)


def test_spans_of_layers() -> None:
    assert _spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


class Heads(nn.Module):
    def __init__(self, query: nn.Module, key: nn.Module) -> None:
        super().__init__()
        self.q_layernorm, self.k_layernorm = query, key
        self.config = SimpleNamespace(kv_channels=4)


@pytest.mark.parametrize(
    ("query", "key", "reason"),
    [
        (nn.RMSNorm(4, 1e-5), nn.RMSNorm(4, 1e-5), None),
        (IdentityOp(), IdentityOp(), None),
        (nn.RMSNorm(4, 1e-5), nn.RMSNorm(4, 1e-6), "queries and keys are normed in two ways"),
        (nn.RMSNorm(8, 1e-5), nn.RMSNorm(8, 1e-5), "not normed head by head"),
        (nn.LayerNorm(4), nn.LayerNorm(4), "queries and keys are normed by LayerNorm"),
        (nn.RMSNorm(4, 1e-5), IdentityOp(), "queries and keys are normed by RMSNorm and Ident"),
    ],
    ids=str,
)
def test_norms_of_heads(query: nn.Module, key: nn.Module, reason: str | None) -> None:
    heads = Heads(query, key)
    found = why_not_head_norms(heads)
    assert (found is None) if reason is None else (reason in str(found))
    if found is None:
        assert (built_head_norms(heads) is None) == isinstance(query, IdentityOp)


def test_identities_are_no_obstacle() -> None:
    assert built_norm(IdentityOp()) is None
    assert built_norm(nn.RMSNorm(4)) is None, "without eps torch takes the dtype's"
    assert built_norm(nn.RMSNorm(4, eps=1e-5)) is not None
