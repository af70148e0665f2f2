// The passes of select that keep key by key, in the order in which select.cu launches them.
#pragma once

#include "cuda/select/sample.h"
#include "cuda/select/space.h"

namespace scope::cuda {

// As many bins as fit beside the tables.
Bins select_bins(const Exec& exec, const ProxyLaunch& proxy);

// What rows weigh.
void bounds_pass(const Exec& exec, const ProxyLaunch& proxy, const SelectSpace& space);
void histogram_pass(const Exec& exec, const ProxyLaunch& proxy, const SelectSpace& space, Bins bins, const RowSet& rows);
// Again, from all keys, for the rows that leave the range of a sample.
void leavers_pass(const Exec& exec, const ProxyLaunch& proxy, const SelectSpace& space, Bins bins);
void scan_pass(const Exec& exec, const ProxyLaunch& proxy, const SelectSpace& space, Bins bins);

// One rho for all heads of a sample.
void solve_sample_pass(const Exec& exec, const ProxyLaunch& proxy, const SelectSpace& space, Bins bins,
                       const RuleLaunch& rule, const SampleSpace& sample);

// How many keys reach rho; emit_pass finds what refine_pass looks at.
void solve_pass(const Exec& exec, const ProxyLaunch& proxy, const SelectSpace& space, Bins bins, const RuleLaunch& rule);
void refine_pass(const Exec& exec, const ProxyLaunch& proxy, const SelectSpace& space, Bins bins, const RuleLaunch& rule);
void exact_top_p_pass(const Exec& exec, const ProxyLaunch& proxy, const SelectSpace& space, const RuleLaunch& rule);

// What is kept.
void budgets_pass(const Exec& exec, const ProxyLaunch& proxy, const SelectSpace& space, Bins bins, const RuleLaunch& rule);
// Of all rows, or without a mask candidates alone, of those that refine_pass wants.
void emit_pass(const Exec& exec, const ProxyLaunch& proxy, const SelectSpace& space, Bins bins, const MaskLaunch& mask);
void pick_pass(const Exec& exec, const ProxyLaunch& proxy, const SelectSpace& space, Bins bins, const MaskLaunch& mask);
void exact_select_pass(const Exec& exec, const ProxyLaunch& proxy, const SelectSpace& space, const RuleLaunch& rule,
                       const MaskLaunch& mask);

}  // namespace scope::cuda
