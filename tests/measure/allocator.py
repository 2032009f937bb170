"""An independent truth for the memory ledger: what the CPU's allocator was asked for, as torch.profiler saw it."""

from torch.profiler import ProfilerActivity, profile


def allocator_peak(run):
    """Run it, and return the most bytes that were allocated at once beyond those at its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
