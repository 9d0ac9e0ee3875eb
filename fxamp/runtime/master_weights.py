"""An optimizer that updates float32 masters of low-precision parameters, bucket by bucket."""

import collections
import copy
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._compile import _disable_dynamo

from fxamp import recorded
from fxamp.errors import OptionError
from fxamp.logs import configure_logging
from fxamp.runtime import gradients, master_gradients
from fxamp.runtime.device_skip import settle, step_unless, takes_found_inf
from fxamp.runtime.layouts import Layouts
from fxamp.runtime.loaded_masters import LoadedMasters, check_masters
from fxamp.runtime.master_checks import (
    check_apart,
    check_arguments,
    check_closure,
    check_group,
    check_is_state,
    check_state,
    check_step_arguments,
    whole_step,
)
from fxamp.runtime.masters import (
    MASTER,
    are_low,
    attach_master,
    detach_master,
    ensure_master,
    ensure_masters,
    in_a_step,
    is_low,
    master_of,
    one_at_a_time,
    reconcile_,
    resync,
    round_into,
)
from fxamp.runtime.rounding import Compensation, StochasticRounding
from fxamp.runtime.stand_ins import StandIns, apart, buckets, step_of_each
from fxamp.runtime.step_hooks import hooks_around
from fxamp.runtime.unseen_writes import UnseenWrites
from fxamp.runtime.whole_calls import call_on_stand_ins, give_back_gradients, has_own_method, is_trained, written
from fxamp.runtime.wide_state import load_wide, widen_state_
from fxamp.runtime.writes import versions_of

BUCKET_BYTES = 64 * 2**20  # of float32 gradients alive at once
HOOK_TABLES = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class MasterWeightOptimizer(torch.optim.Optimizer):
    """Wraps any optimizer so that 16-bit parameters are updated in float32.

        model.half()
        optimizer = fxamp.MasterWeightOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))

    It is the wrapped optimizer in every other respect: `param_groups` and `state` are that optimizer's own,
    keyed by the model's parameters, so schedulers, hooks, clipping and `add_param_group` work on either.
    Parameters that are float32 already, or frozen, cost nothing.

    Step, for each bucket of parameters: gradients become float32 (divided by the loss scale there, so that
    nothing vanishes), the wrapped optimizer updates the masters, the parameters take the masters' rounding.
    With a loss scaler a non-finite step changes nothing, decided on the device.

    Memory in bytes for one 16-bit parameter under Adam: 2 (parameter) + 2 (gradient) + 4 (master) + 8 (state)
    = 16, and for a moment the float32 gradients of one bucket: at most `bucket_bytes`. A wrapped optimizer
    that is not `fused` needs four times that under a loss scaler, because masters and state of the bucket
    are kept for the way back, and at most 64 MiB, or an eighth of that, more. An optimizer of another package,
    which may look at all parameters at once, is stepped as one bucket (under a scaler with one more copy of the
    gradients); frozen parameters it does not see.

    Args:
        optimizer: any torch.optim.Optimizer, over the model's parameters.
        masters: "fp32"; or without masters "kahan" (a 16-bit compensation for each parameter: 2 bytes
            instead of 4) or "stochastic" (random rounding of the update: 0 bytes). Both are for bfloat16.
        bucket_bytes: of float32 gradients alive at once.

    Raises:
        OptionError: no optimizer, one wrapped already, one around another (Lookahead), parameters that are views of one
            another, or an argument out of range.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, masters: str = "fp32", bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        configure_logging()
        check_arguments(optimizer, masters, bucket_bytes)
        check_apart(gradients.parameters(optimizer))
        self.optimizer = optimizer
        self.masters = masters
        self.bucket_bytes = bucket_bytes
        self._rounding: Compensation | StochasticRounding | None = None
        self._loaded = LoadedMasters()
        self._unseen = UnseenWrites()
        self._layouts = Layouts()
        for table in HOOK_TABLES:
            setattr(self, table, collections.OrderedDict())
        self._patch_step_function()
        self._adopt(gradients.parameters(self))

    # The wrapped optimizer's own attributes

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups, holding the model's parameters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state, float32, keyed by the model's parameters."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its low-precision parameters get masters.

        Raises:
            OptionError: no dict with "params".
        """
        check_group(param_group)
        self.optimizer.add_param_group(param_group)
        try:
            check_apart(gradients.parameters(self))
        except OptionError:
            self.optimizer.param_groups.pop()
            raise
        self._adopt(self.optimizer.param_groups[-1]["params"])

    @_disable_dynamo  # which has no parameters whose gradients are of another dtype
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; those that `unscale_` widened are 16 bits again."""
        master_gradients.drop_widened(gradients.parameters(self), set_to_none)
        self.optimizer.zero_grad(set_to_none)

    @_disable_dynamo
    def master_params(self) -> Iterator[torch.Tensor]:
        """The float32 tensors that are updated: masters, and parameters that need none.

        Between backward and step they have the gradients of the model's parameters, which are float32 from here to
        zero_grad(), and a `.grad` that one is given here is the parameter's too. Those kept from before the backward
        have none until `unscale_`.
        """
        self._loaded.settle(self._rounding)
        for parameter in gradients.parameters(self):
            master = master_of(parameter)
            if master is not None and not master_gradients.is_used(parameter.grad):
                master_gradients.widen_gradients_([parameter])
            else:
                master_gradients.take_gradient(parameter)
                master_gradients.mirror_gradient(parameter)
            yield parameter if master is None else master
            master_gradients.take_gradient(parameter)

    def take_gradients(self) -> None:
        """Let parameters have the gradients that the user has given their masters; `step` does so."""
        master_gradients.take_gradients(gradients.parameters(self))

    def resync_masters(self) -> None:
        """Take over values written past autograd's version counter, such as `parameter.data.copy_(...)`.

        With several ranks masters give up their low bits: called on all after a broadcast, all hold the same.
        """
        for parameter in filter(lambda each: hasattr(each, MASTER), gradients.parameters(self)):
            resync(parameter)
        self._loaded.settle(self._rounding)

    @torch.no_grad()
    def take_writes(self) -> None:
        """Let masters take what was written into parameters since the last step; `step` does so.

        What autograd does not count (`p.data.clamp_(...)`) is seen where it is usual (`fxamp.runtime.unseen_writes`).
        """
        for parameter in gradients.parameters(self):
            master_of(parameter)
        self._unseen.take(self)

    # Stepping

    @_disable_dynamo
    @torch.no_grad()
    def widen_gradients_(self) -> None:
        """Turn the 16-bit gradients of parameters with masters into float32 ones, all at once.

        For `scaler.unscale_`, after which `.grad` must hold true values, of the parameter and of its master
        (it is one tensor). Costs 4 bytes a parameter until zero_grad(); clipping by
        `scaler.step(optimizer, max_grad_norm=...)` does without.
        """
        master_gradients.widen_gradients_(gradients.parameters(self))

    @_disable_dynamo  # torch.compile around a training step: masters are attributes of tensors
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Update masters from the gradients, and parameters from the masters.

        A scaler (ours or torch's) sets the attributes `grad_scale` (0-d float32, still to divide by, or None)
        and `found_inf` (0-d float32) beforehand, as for torch's fused optimizers.

        Args:
            closure: re-evaluates the model and returns the loss; all parameters are then one bucket.
            args, kwargs: go to the step of an optimizer of another package.

        Raises:
            OptionError: a closure that cannot be called, or none for an optimizer that needs one; arguments that its
                step does not take.
        """
        check_step_arguments(self.optimizer, args, kwargs)
        settle(self.optimizer)
        self._loaded.settle(self._rounding, is_last=True)
        self._unseen.take(self)
        self.take_gradients()
        grad_scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers made before wrapping
        check_closure(self.optimizer, closure)
        given = (closure, *args) if closure is not None or args else ()
        with hooks_around(self.optimizer, given, kwargs) as (given, kwargs):
            if given and given[0] is not None:
                return self._call_whole(self.optimizer.step, *given, gives_back=False, **kwargs)
            returned = self._step_all(grad_scale, found_inf, whole_step(self.optimizer, given[1:], kwargs))
        master_gradients.mark_used(gradients.parameters(self))
        return returned

    def _step_all(
        self, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None, whole: Callable[[], Any]
    ) -> Any:
        bare = step_of_each(self.optimizer)
        divides = bare is not None and found_inf is not None and takes_found_inf(self.optimizer)  # in its kernels
        inverse = None if grad_scale is None or divides else grad_scale.reciprocal()
        run = bare or whole
        if found_inf is not None:
            divisor = grad_scale if divides else None
            run = functools.partial(step_unless, self.optimizer, found_inf, run, grad_scale=divisor)
        if bare is None:  # it may know parameters by their places: those without a gradient stay among them
            every = [p for p in gradients.parameters(self) if p.grad is not None or is_trained(self, p)]
            return self._step_bucket(self.param_groups, every, inverse, found_inf, run)
        for group in self.param_groups:
            for bucket in buckets(group["params"], self.bucket_bytes):
                self._step_bucket([group], bucket, inverse, found_inf, run)
        return None

    def _step_bucket(
        self,
        groups: list[dict[str, Any]],
        bucket: list[torch.Tensor],
        inverse: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        run: Callable[[], Any],
    ) -> Any:
        with one_at_a_time:
            wide = self._wide(bucket)
            in_a_step.update(map(id, bucket))
        is_whole = step_of_each(self.optimizer) is None
        versions = versions_of(wide) if is_whole else None  # a bucket of one has gradients alone
        keeps_none = not is_whole and not recorded.is_capturing(bucket[0].device)
        lent = master_gradients.lent_gradients(bucket, wide, inverse, self._layouts if keeps_none else None)
        try:
            with lent, StandIns(self.optimizer, groups, bucket, wide):
                returned = run()
            with one_at_a_time:
                self._take_back(bucket, wide, found_inf, versions)
        finally:
            in_a_step.difference_update(map(id, bucket))
        return returned

    def _wide(self, bucket: list[torch.Tensor]) -> list[torch.Tensor]:
        """What stands in for each parameter: its master, or itself."""
        if self._rounding is None and are_low(bucket):
            return ensure_masters(bucket)
        for parameter in bucket:
            if not is_low(parameter) and MASTER in parameter.__dict__:
                detach_master(parameter)  # one from before `model.float()` may not see what this step writes
        widen = ensure_master if self._rounding is None else self._rounding.widened
        return [widen(parameter) if is_low(parameter) else parameter for parameter in bucket]

    def _take_back(
        self,
        bucket: list[torch.Tensor],
        wide: list[torch.Tensor],
        found_inf: torch.Tensor | None,
        versions: list[Any] | None = None,
    ) -> None:
        """Let parameters take what their stand-ins are now; those without gradients by `written`, given `versions`."""
        low, high = bucket, wide
        if versions is not None:
            low, high = written(bucket, wide, versions, is_kept=self._rounding is None)
        elif any(map(operator.is_, bucket, wide)):
            low, high = apart(bucket, wide)
        if self._rounding is not None:
            self._rounding.take_back(low, high, found_inf)
            return
        round_into(low, high)

    def _call_whole(self, method: Callable[..., Any], /, *args: Any, gives_back: bool, **kwargs: Any) -> Any:
        """Call a method while stand-ins take the place of all parameters that are or were trained.

        Frozen ones are there too, since L-BFGS counts elements once for all its steps.
        """
        every = list(gradients.parameters(self))
        wide = [self._wide([each])[0] if is_trained(self, each) else each for each in every]
        with master_gradients.lent_gradients(every, wide, None):
            returned = call_on_stand_ins(self.optimizer, every, wide, method, *args, **kwargs)
            if gives_back:
                give_back_gradients(every, wide)
        self._take_back(every, wide, None)
        return returned

    def __getattr__(self, name: str) -> Any:
        """A method that the wrapped optimizer's class adds to torch's: it sees float32 masters, as its step does."""
        optimizer = self.__dict__.get("optimizer")
        if optimizer is None or not has_own_method(optimizer, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return functools.partial(self._call_own_method, getattr(optimizer, name))

    @torch.no_grad()
    def _call_own_method(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._loaded.settle(self._rounding, is_last=True)
        self.take_gradients()
        return self._call_whole(method, *args, gives_back=True, **kwargs)

    # Saving and copying

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict in float32, which that optimizer loads alone, plus the masters.

        The extra entry "masters" ({index of the parameter: float32 tensor}) makes a resumed run bit-exact
        even if the model was saved in 16 bits; plain optimizers ignore it.
        """
        for hook in list(self._optimizer_state_dict_pre_hooks.values()):
            hook(self)
        result: dict[str, Any] = self.optimizer.state_dict()
        kept = self._kept()
        if kept:
            result["masters"] = kept
        for post_hook in list(self._optimizer_state_dict_post_hooks.values()):
            result = post_hook(self, result) or result
        return result

    def _kept(self) -> dict[int, torch.Tensor]:
        self._loaded.settle(self._rounding)
        indexed = enumerate(gradients.parameters(self))
        if self._rounding is not None:
            return self._rounding.state(list(indexed))
        found = ((index, master_of(parameter)) for index, parameter in indexed)
        return {index: master for index, master in found if master is not None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, with any `masters`, or of the plain optimizer; it stays float32.

        The weights are the model's to load, before or after. Where they are the rounding of the saved masters, these
        give them their low bits; where they are others (an average of weights), they stay as they are.

        Raises:
            OptionError: no state of such an optimizer, or masters that are not of these parameters; nothing is changed.
        """
        check_is_state(state_dict)
        state_dict = dict(state_dict)
        for hook in list(self._optimizer_load_state_dict_pre_hooks.values()):
            state_dict = hook(self, state_dict) or state_dict
        kept = state_dict.pop("masters", {})
        every = list(gradients.parameters(self))
        check_masters(every, kept)
        check_state(self.optimizer, state_dict)
        load_wide(self.optimizer, every, state_dict)
        self._loaded.load(every, kept, self._rounding)
        for post_hook in list(self._optimizer_load_state_dict_post_hooks.values()):
            post_hook(self)

    def _adopt(self, parameters: Iterable[torch.Tensor]) -> None:
        """Give every trainable low-precision parameter what its mode needs, and float32 state.

        Only where it is new here: some optimizers keep 16-bit state on purpose.
        """
        low = [p for p in parameters if is_low(p)]
        if self.masters == "fp32":
            for parameter in low:
                if parameter.requires_grad:
                    ensure_master(parameter)
                    reconcile_(parameter)  # another optimizer's fused step may have written it, which leaves no version
        else:
            if self._rounding is None:
                self._rounding = Compensation() if self.masters == "kahan" else StochasticRounding()
            for parameter in low:
                detach_master(parameter)
        widen_state_(self.optimizer, low)

    def __getstate__(self) -> dict[str, Any]:
        settle(self.optimizer)
        return {
            "optimizer": self.optimizer,
            "masters": self.masters,
            "bucket_bytes": self.bucket_bytes,
            "_rounding": self._rounding,
            "_loaded": self._loaded,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        for table in HOOK_TABLES:
            self.__dict__.setdefault(table, collections.OrderedDict())
        self.__dict__.update(state)
        self._unseen = UnseenWrites()
        self._layouts = Layouts()
        self._patch_step_function()

    def __deepcopy__(self, memo: dict[int, Any]) -> "MasterWeightOptimizer":
        settle(self.optimizer)
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__({name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()})
        for mine, theirs in zip(gradients.parameters(self), gradients.parameters(twin), strict=True):
            master = master_of(mine)
            if master is not None and not hasattr(theirs, MASTER):
                attach_master(theirs, master.detach().clone())
        return twin

    def __repr__(self) -> str:
        return f"MasterWeightOptimizer(masters={self.masters!r}, {self.optimizer!r})"
