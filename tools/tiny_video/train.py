"""Trains the tiny Wan on procedural clips: flow matching, first a quarter-size grid, then the demo grid with larger ones mixed in.

The plan is in minutes, so the learning rate follows the clock and a run ends when its time is over. Run it again with
the same --out to resume: data, noise, weights, EMA and optimiser state continue where they stopped.
"""

import argparse
import io
import math
import os
import signal
import sys
import time

import torch
import torch.nn.functional as F

import video
from files import write_atomic
from net import CONFIG, TinyWan
from optim import make_optimisers

SMALL = ((13, 10, 16), 32)  # (grid, batch): about 66,000 tokens a step, like the full grid
FULL = ((13, 20, 32), 8)
LARGE = ((16, 30, 48), 2)
WAN_720P = ((21, 45, 80), 1)
SHIFT = 3.0  # of the noise level, in training and sampling


def stage(step, seconds, args):
    """Grid and batch of a step. Of 80 full steps five are large and one is Wan's 720p grid."""
    if args.smoke:
        return (3, 4, 6), 2
    if seconds < 60 * args.minutes_small:
        return SMALL
    if args.demo_grid_only:
        return FULL
    return WAN_720P if step % 80 == 79 else LARGE if step % 16 == 7 else FULL


def loss_of(net, render, step, grid, batch, device):
    """Flow-matching loss of one batch; every random number is a function of the step, so a resumed run continues exactly."""
    generator = torch.Generator(device).manual_seed(step)
    seeds = torch.arange(step * 32, step * 32 + batch, device=device)  # 32: the largest batch, so no seed is met twice
    scene = video.scene(seeds, grid)
    latent = video.to_latent(render(scene, grid))
    noise = torch.randn(latent.shape, device=device, generator=generator)
    u = (torch.arange(batch, device=device) + torch.rand(batch, device=device, generator=generator)) / batch
    sigma = SHIFT * u / (1 + (SHIFT - 1) * u)
    level = sigma.view(-1, 1, 1, 1, 1)
    inputs = torch.cat([(1 - level) * latent + level * noise, video.image_condition(latent)], 1)
    # cuDNN's attention is twice as fast as the other kernels, but a trial that used it at every grid went to NaN within 50
    # steps (cause not established). At these token counts alone it ran 22,569 steps without one bad gradient.
    torch.backends.cuda.enable_cudnn_sdp(math.prod(grid) % 128 in (0, 32))
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        velocity = net(inputs, sigma * 1000, video.condition(scene))
    return F.mse_loss(velocity, noise - latent)


def clip_gradients(params):
    """Scales the gradient to norm one at most, and to zero when it is not finite; returns whether it was, without waiting."""
    gradients = [p.grad for p in params]
    norm = torch.nn.utils.get_total_norm(gradients)
    finite = torch.isfinite(norm)
    for g in gradients:
        g.nan_to_num_(0, 0, 0)
    torch._foreach_mul_(gradients, torch.where(finite, (1 / norm).clamp(max=1), 0))
    return finite


def identity(args):
    """What a checkpoint must share with the run that resumes it. Minutes may change."""
    return {"net": CONFIG, "optimiser": args.optimiser, "lr": args.lr, "smoke": args.smoke}


def load_checkpoint(path, args, device):
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        sys.exit(f"error: {path} is not a readable checkpoint ({error}); move it away to start afresh")
    wanted = identity(args)
    found = state.get("identity", {}) if isinstance(state, dict) else {}
    differing = [k for k in wanted if found.get(k) != wanted[k]]
    if differing:
        lines = "; ".join(f"{k}: checkpoint {found.get(k)!r}, this run {wanted[k]!r}" for k in differing)
        sys.exit(f"error: {path} was made with another configuration ({lines}); use another --out, or --init for its weights")
    return state


def save(path, data):
    try:
        write_atomic(path, data)
    except OSError as error:
        kept = "the previous one is intact" if os.path.exists(path) else "there is no earlier one"
        sys.exit(f"error: {path} could not be written ({error.strerror}); {kept}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder of checkpoint.pt and log.csv; resumed when it has a checkpoint")
    parser.add_argument("--minutes-small", type=float, default=5, help="plan: minutes at 13x10x16")
    parser.add_argument("--minutes-full", type=float, default=11.7, help="plan: minutes at 13x20x32 and the larger grids")
    parser.add_argument("--run-minutes", type=float, default=1e9, help="stop this process after so many minutes, start included")
    parser.add_argument("--save-minutes", type=float, default=2, help="time between checkpoints")
    parser.add_argument("--init", help="safetensors weights to start from instead of random ones")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--optimiser", choices=["muon", "adamw"], default="muon")
    parser.add_argument("--demo-grid-only", action="store_true", help="no grids above 13x20x32")
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--smoke", action="store_true", help="a tiny grid without compilation, for a CPU")
    args = parser.parse_args()
    started = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stop = []
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, lambda number, frame: stop.append(number))

    os.makedirs(args.out, exist_ok=True)
    path = os.path.join(args.out, "checkpoint.pt")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    net = TinyWan().init_weights().to(device)
    if args.init:
        from safetensors.torch import load_file

        net.load_state_dict(load_file(args.init, device))
    optimisers = make_optimisers(net, args.lr, args.optimiser)
    ema = {name: p.detach().clone() for name, p in net.state_dict().items()}
    step, seconds, log = 0, 0.0, []
    if os.path.exists(path):
        state = load_checkpoint(path, args, device)
        net.load_state_dict(state["net"])
        ema, step, seconds, log = state["ema"], state["step"], state["seconds"], state["log"]
        for optimiser, saved in zip(optimisers, state["optimisers"]):
            optimiser.load_state_dict(saved)
        print(f"resumed at step {step}, {seconds / 60:.1f} minutes trained")

    def checkpoint():
        state = dict(identity=identity(args), net=net.state_dict(), ema=ema, step=step, seconds=seconds, log=log)
        buffer = io.BytesIO()
        torch.save(state | {"optimisers": [o.state_dict() for o in optimisers]}, buffer)
        save(path, buffer.getbuffer())
        lines = "".join(f"{a},{b:.1f},{c},{d:.5f}\n" for a, b, c, d in log)
        save(os.path.join(args.out, "log.csv"), f"step,seconds,tokens,loss\n{lines}".encode())

    render = video.render
    if device == "cuda":
        torch._dynamo.config.recompile_limit = 64
        render = torch.compile(video.render, dynamic=False)
        for block in net.blocks:
            block.compile(dynamic=False)

    total = 60 * (args.minutes_small + args.minutes_full)
    averaged, weights = list(ema.values()), list(net.state_dict().values())
    last_save = tick = time.monotonic()
    recent, params, compiled, finished = {}, list(net.parameters()), set(), False
    skipped = torch.zeros((), dtype=torch.int64, device=device)
    while not finished:
        grid, batch = stage(step, seconds, args)
        if device == "cuda" and grid not in compiled:  # compilation is not training time
            loss_of(net, render, step, grid, batch, device).backward()
            net.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            compiled.add(grid)
            tick = time.monotonic()
            print(f"compiled {grid} after {tick - started:.0f} s", flush=True)
        factor = min(1, (step + 1) / 300) * max(0.02, 0.5 + 0.5 * math.cos(math.pi * min(1, seconds / total)))
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["base_lr"] * factor
        loss = loss_of(net, render, step, grid, batch, device)
        loss.backward()
        skipped += ~clip_gradients(params)
        for optimiser in optimisers:
            optimiser.step()
        net.zero_grad(set_to_none=True)
        step += 1
        torch._foreach_lerp_(averaged, weights, 1 - min(0.999, step / (step + 9)))
        recent.setdefault(math.prod(grid), []).append(loss.detach())

        if step % 50 == 0 or step >= args.max_steps or stop or args.smoke:
            for tokens, losses in recent.items():  # reading the losses waits for the device, so the clock is true here
                log.append((step, seconds, tokens, torch.stack(losses).mean().item()))
                if not math.isfinite(log[-1][3]):
                    sys.exit(f"error: the loss is not finite at step {step}; the last checkpoint is intact")
            recent = {}
        now = time.monotonic()
        seconds, tick = seconds + now - tick, now
        if step % 500 == 0:
            print(f"step {step} minute {seconds / 60:.1f} loss {log[-1][3]:.4f} lr {args.lr * factor:.1e}", flush=True)
        finished = bool(stop) or seconds >= total or step >= args.max_steps or now - started > 60 * args.run_minutes
        if finished or now - last_save > 60 * args.save_minutes:
            checkpoint()
            last_save = tick = time.monotonic()  # writing is not training time

    print(f"stopped at step {step}, {seconds / 60:.2f} of {total / 60:.2f} minutes, {skipped.item()} steps skipped; {path}")
    if stop:
        sys.exit(128 + stop[0])


if __name__ == "__main__":
    main()
