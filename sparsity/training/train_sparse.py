"""`gossamer.train_sparse` attaches a recipe to a model and its optimizer.

training = gossamer.train_sparse(model, optimizer, "rigl", sparsity=0.9, steps=len(data) * epochs)
...                                                   the training loop stays the same; hooks of the optimizer change masks
training.detach()                                     plain weights with zeros

The hooks call `Masks` (masks.py), which holds a `Masked` for each layer.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from gossamer.dialects.errors import OptionError
from gossamer.runtime.modules.when_held import say_held
from gossamer.sparsity.pruning.choose_layers import Layers
from gossamer.sparsity.pruning.layers import Layer, layers_of, once_each
from gossamer.sparsity.pruning.mask import original_of
from gossamer.sparsity.pruning.stored_experts import StoredExperts
from gossamer.sparsity.pruning.stored_layers import is_stored
from gossamer.sparsity.training.adam_variance import FrozenVariance
from gossamer.sparsity.training.first_values import first_value
from gossamer.sparsity.training.masked import Masked, take_masks
from gossamer.sparsity.training.masks import Masks
from gossamer.sparsity.training.open_sizes import OpenSizes
from gossamer.sparsity.training.recipe import Recipe
from gossamer.sparsity.training.recipes import recipe_of
from gossamer.sparsity.training.schedules import Exchange
from gossamer.sparsity.training.sharded_weight import ShardedWeight
from gossamer.sparsity.training.stored_weight import StoredWeight
from gossamer.sparsity.training.swap_weight import store_weight, unstore_weight


def train_sparse(
    model: nn.Module, optimizer: Optimizer, recipe: str | Recipe, *, steps: int = 0, only: Layers | None = None,
    skip: Layers = (), seed: int = 0, store: bool = False, **options: Any,
) -> "SparseTraining":  # fmt: skip
    """Makes each further `optimizer.step()` follow a recipe, so that the model becomes or stays sparse.

    Returns a `SparseTraining`, whose `detach()` ends it.

    recipe   "fixed", "one-shot", "gradual", "random", "set", "rigl", "soft", "sr-ste", "mask-decay",
             "progressive-gradient-flow", "structure-decay", "step" or "bi-mask", with its `options`; or a `Recipe`.
             `help("gossamer.sparsity.training.recipes")` has their papers and defaults
    steps    the number of steps of the whole training; "fixed", "one-shot" and "random" do not need it
    only, skip  which layers, as for `sparsify`. Without `only`: linear layers, experts, Conv2d and nn.MultiheadAttention
    seed     the seed of random choices; it must be the same on all processes
    store    linear layers store only their nonzeros until `detach`, as soon as half of all their elements are zeros

    - Call it before or after torch.compile, and before or after Accelerate's `prepare`. Gradient scaling, accumulation and
      clipping work.
    - In recipes whose pruned weights stay zero, weights stay plain parameters, and their gradients are masked as soon as they
      are computed. Other recipes put a parametrization on the weight; its parameter stays the same object.
    - With DistributedDataParallel, pass the wrapped model. Attach recipes with parametrizations before you wrap it.
    - "fixed" takes over the masks of `gossamer.sparsify` and `gossamer.prepare`.

    With `store` the time and the memory of a step depend on the number of nonzeros: forward, backward and optimizer. The
    recipes for it are "fixed", "one-shot", "gradual", "random", "set" and "rigl". Weights, gradients and the optimizer's state
    become SparseTensors, so call `model.parameters()` again, for instance to clip gradients. The plain parameters are empty
    meanwhile; `detach` puts the same objects back.

    The same recipes take weights of `gossamer.store_sparse`. Nonzeros start where they are stored, and move with their state in
    the optimizer. "rigl" computes gradients of all elements in the steps before nonzeros move.

    OptionError if arguments contradict each other.
    """
    if isinstance(recipe, str):
        recipe = recipe_of(recipe, steps, **options)
    elif options:
        raise OptionError(f"{', '.join(options)}: these are options of a recipe's name. A Recipe has its own: give them to it")
    return SparseTraining(model, optimizer, recipe, only, skip, seed, store)


class SparseTraining:
    """A recipe that is attached to a model and an optimizer. `train_sparse` returns it.

    `step` counts the optimizer's steps, and `masks` has the layers with their masks.

    `state_dict()` has the state that those of model and optimizer lack. To go on later, attach the same recipe and load all
    three in any order: training continues bit for bit.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, recipe: Recipe, only: Layers | None, skip: Layers, seed: int,
        store: bool = False,
    ) -> None:  # fmt: skip
        optimizer = _own(optimizer)
        if store:
            _check_storable(model, recipe)
        model, together = _of_this_process(model, recipe)
        keeps_zeros = recipe.sparsifier.saliency == "zeros"
        kinds = (nn.Conv2d, nn.MultiheadAttention)
        layers = once_each(layers_of(model, only, skip, kinds, stored=True, masked=keeps_zeros, experts=True))
        _check_trained(layers, optimizer)
        self.optimizer, self.recipe, self.step = optimizer, recipe, 0
        stored = [_stored(each, optimizer, recipe) for each in layers]
        kept = take_masks(model, layers)
        between = recipe.sparsifier.frozen_variance
        weights: list[Tensor] = [layer.parameter for layer in layers]
        self._variance = FrozenVariance(optimizer, weights, *between) if between is not None else None
        known = [own or _sharded(each, recipe) or each for own, each in zip(stored, layers, strict=True)]
        self.masks = Masks(known, recipe, seed, together, kept)
        self._storable = _storable(self.masks, model) if store else set[Masked]()
        if store:
            say_held(model)
        if keeps_zeros and all(layer.first == 0 for layer in self.masks.layers):
            raise OptionError("no layer has zeros that could stay: prune the model first, or take another recipe")
        self._skipped = False
        self._open = self._opened()
        self._hooks = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]
        if self._variance is not None:
            self._variance.begin()
        if recipe.sparsifier.pruned == "stay":
            self._hooks += [self._hook_gradient(layer) for layer in self.masks.layers if not isinstance(layer, StoredWeight)]
        self._advance()
        self._swap()

    def _opened(self) -> OpenSizes | None:
        """Makes compiled graphs leave the number of nonzeros open if steps change that of stored weights."""
        stored = self._storable or any(isinstance(layer, StoredWeight) for layer in self.masks.layers)
        if not stored or self.recipe.sparsifier.grows is not None or not self.recipe.schedule.end:
            return None
        found = OpenSizes()
        weakref.finalize(self, found.close)
        return found

    def densities(self) -> dict[str, float]:
        """Returns the share of elements that each layer keeps."""
        names = ((layer, name) for layer in self.masks.layers for name in layer.names)
        return {name: layer.density for layer, name in names}

    def detach(self) -> None:
        """Ends the training: weights are plain parameters with zeros, the same objects as before."""
        for hook in self._hooks:
            hook.remove()
        self._look_no_more()
        if self._hooks:
            self._storable = set()
            self._swap()
            self.masks.remove()
            if self._variance is not None:
                self._variance.end()
        if self._open is not None:
            self._open.close()
        self._hooks = []

    def state_dict(self) -> dict[str, Any]:
        """Returns the step, the masks and other state of the recipe. torch.load(weights_only=True) reads it."""
        variance = None if self._variance is None else self._variance.state_dict()
        return {"step": self.step, "variance": variance, **self.masks.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state, before or after model and optimizer do. OptionError for another recipe or other layers."""
        self._look_no_more()
        self.masks.load_state_dict(state)
        self._swap()
        self.step = state["step"]
        if self._variance is not None:
            self._variance.load_state_dict(state["variance"])
        self._look_if_due()

    def _hook_gradient(self, layer: Masked) -> Any:
        def masked(gradient: Tensor) -> Tensor:
            layer.came = True
            if self._grows_next:
                layer.see(gradient)
            return gradient * layer.mask

        @torch.no_grad()
        def accumulated(weight: Tensor) -> None:
            assert weight.grad is not None
            layer.came = True
            if self._grows_next:
                layer.see(weight.grad)
            layer.restrict(weight.grad)

        if isinstance(layer, ShardedWeight):  # FSDP2 calls no other hook
            return layer.parameter.register_post_accumulate_grad_hook(accumulated)
        return layer.parameter.register_hook(masked)

    @property
    def _grows_next(self) -> bool:
        schedule = self.recipe.schedule
        return self.recipe.sparsifier.grows == "gradient" and schedule.is_due(self.step + 1)

    @torch.compiler.disable
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Runs before a step of the optimizer. With GradScaler, a fused optimizer itself skips steps and unscales gradients."""
        found: Tensor | None = getattr(optimizer, "found_inf", None)
        scale = float(getattr(optimizer, "grad_scale", None) or 1.0)
        self._skipped = found is not None and bool(found)
        if self._skipped:
            return None
        if self._variance is not None:
            self._variance.before_step()
        arguments = dict(enumerate(args)) | kwargs
        at = next((key for key in (1, "closure") if arguments.get(key) is not None), None)
        if at is None:
            self._see_gradients(scale)
            return None
        arguments[at] = self._seen_by(arguments[at])  # gradients exist only after the closure
        return tuple(arguments[n] for n in range(len(args))), {key: arguments[key] for key in kwargs}

    def _seen_by(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Returns the closure of a step with `_see_gradients` after each call. The optimizer may call it several times."""
        calls = 0

        def evaluated() -> Any:
            nonlocal calls
            calls += 1
            result = closure()
            self._see_gradients(1.0, first=calls == 1)
            return result

        return evaluated

    @torch.compiler.disable
    def _see_gradients(self, scale: float, first: bool = True) -> None:
        """Updates the saliency by the gradients of a step's `first` evaluation, and adds the decay of pruned weights."""
        for layer in self.masks.layers if self.recipe.sparsifier.pruned == "stay" else ():
            if not isinstance(layer, StoredWeight):
                layer.take_assigned(self._grows_next)
        if first:
            self.masks.observe(scale)
        if decay := self.recipe.sparsifier.decay:
            with torch.no_grad():
                for layer in self.masks.layers:
                    if layer.parameter.grad is not None:
                        layer.parameter.grad.add_(layer.parameter * ~layer.mask, alpha=decay * scale)

    @torch.compiler.disable
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._skipped:
            return
        self._look_no_more()
        self.step += 1
        if self._variance is not None:
            self._variance.after_step(self.step)
        self._advance()

    def _advance(self) -> None:
        """Makes the masks for the step that was done, if the recipe has begun with masks."""
        if self._variance is not None and self._variance.since is None:
            return
        changed = self.masks.advance(self.step)
        self.masks.apply(self.step)
        if changed and self.recipe.sparsifier.pruned == "stay":
            self._forget_momentum()
            self._swap()
        self._look_if_due()

    def _swap(self) -> None:
        """Stores the weights of layers that may be stored and are sparse enough, and makes other weights plain."""
        layers = self.masks.layers
        for n, layer in enumerate(layers):
            wanted = self.masks.foresight.is_ripe(layer)
            if layer in self._storable and wanted:
                layers[n] = store_weight(layer, self.optimizer)
            elif isinstance(layer, StoredWeight) and layer.plain is not None and not (layer.plain in self._storable and wanted):
                layers[n] = unstore_weight(layer)

    def _look_if_due(self) -> None:
        """Makes stored weights compute the gradient of all elements, if nonzeros move after the next step."""
        for layer in self.masks.layers if self._grows_next else ():
            if isinstance(layer, StoredWeight):
                layer.look_at_all()

    def _look_no_more(self) -> None:
        for layer in self.masks.layers:
            if isinstance(layer, StoredWeight):
                layer.look_no_more()

    @torch.no_grad()
    def _forget_momentum(self) -> None:
        """Sets the optimizer's state of dropped weights to its first values, so that they start anew when they grow again."""
        if isinstance(self.optimizer, LBFGS):  # its state is past steps of another function, as other weights are zero now
            self.optimizer.state.clear()
            return
        for layer in self.masks.layers:
            if isinstance(layer, StoredWeight):
                continue  # moving its nonzeros has moved their state, too
            for name, value in self.optimizer.state.get(layer.parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == layer.parameter.shape:
                    layer.restrict(value, first_value(self.optimizer, layer.parameter, name))


def _own(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that does the steps: that of the user, not Accelerate's wrapper, which has no hooks."""
    wrapper: Any = optimizer
    return wrapper.optimizer if type(optimizer).__module__ == "accelerate.optimizer" else optimizer


def _of_this_process(model: nn.Module, recipe: Recipe) -> tuple[nn.Module, Callable[[Tensor], Any] | None]:
    """Returns the model that DistributedDataParallel wraps and a function that sums a tensor over processes, or model and None.

    OptionError for a wrapped model and a recipe that would change its modules.
    """
    if not isinstance(model, DistributedDataParallel):
        return model, None
    if recipe.sparsifier.is_latent:
        raise OptionError("this recipe changes the modules: call train_sparse before DistributedDataParallel")
    group = model.process_group
    return model.module, lambda tensor: dist.all_reduce(tensor, group=group)


def _check_trained(layers: Sequence[Layer], optimizer: Optimizer) -> None:
    """OptionError for layers whose weights the optimizer does not train."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    originals = [(layer.name, original_of(layer.module, layer.weight_name)) for layer in layers]
    if missing := [name for name, weight in originals if id(weight) not in held or not weight.requires_grad]:
        raise OptionError(
            f"the optimizer does not train {', '.join(missing)}: give it these weights (with requires_grad), or `skip` them"
        )


def _sharded(layer: Layer, recipe: Recipe) -> ShardedWeight | None:
    """Returns a ShardedWeight if the layer's weight is a DTensor. OptionError for a recipe that would change the module."""
    if not isinstance(layer.parameter, DTensor):
        return None
    if recipe.sparsifier.is_latent:
        raise OptionError(
            f"the weight of '{layer.name}' is a DTensor, a part of it on each process, and this recipe needs a parametrization "
            'on it: take "fixed", "one-shot", "gradual", "random", "set", "rigl" or "soft"'
        )
    found = ShardedWeight(layer.name, layer.module, layer.parameter)
    found.sharers = layer.sharers
    return found


def _check_storable(model: nn.Module, recipe: Recipe) -> None:
    if isinstance(model, DistributedDataParallel):
        raise OptionError(
            "DistributedDataParallel holds on to the parameters it was given: store them first, by gossamer.store_sparse and "
            "gossamer.distributed.data_parallel, and leave out store=True"
        )
    if not _lives_on_nonzeros(recipe):
        raise OptionError(
            'store=True keeps only nonzeros, and this recipe also needs the zeros: take "fixed", "one-shot", "gradual", '
            '"random", "set" or "rigl", by magnitude'
        )


def _storable(masks: Masks, model: nn.Module) -> set[Masked]:
    """Returns the linear layers with plain weights that no other module shares."""
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    return {
        layer for layer in masks.layers
        if type(layer) is Masked and isinstance(layer.module, nn.Linear) and uses[id(layer.parameter)] == 1
    }  # fmt: skip


def _lives_on_nonzeros(recipe: Recipe) -> bool:
    return recipe.sparsifier.pruned == "stay" and recipe.sparsifier.saliency in ("magnitude", "random", "zeros")


def _stored(layer: Layer, optimizer: Optimizer, recipe: Recipe) -> StoredWeight | None:
    """Returns a StoredWeight if the layer's weight is stored. OptionError for a recipe that needs the zeros, too."""
    if not is_stored(layer.module):
        return None
    if isinstance(layer.module, StoredExperts):
        raise OptionError(
            f"'{layer.name}' stores only its nonzeros, which train without a recipe: `skip` it, or call "
            "gossamer.finalize(model) first, which makes weights plain"
        )
    if not _lives_on_nonzeros(recipe):
        raise OptionError(
            f'\'{layer.name}\' stores only its nonzeros, and this recipe also needs the zeros: take "fixed", "one-shot", '
            '"gradual", "random", "set" or "rigl", or gossamer.finalize(model) first, which makes weights plain'
        )
    found = StoredWeight(layer.name, layer.module, optimizer, sharers=layer.sharers)
    if isinstance(recipe.schedule, Exchange) and recipe.sparsity is not None and abs(found.first - recipe.sparsity) > 0.3:
        raise OptionError(
            f"'{layer.name}' stores {1 - found.first:.1%} of its elements, and their number stays the same when nonzeros move: "
            f"give sparsity={found.first:.2f}"
        )
    return found
