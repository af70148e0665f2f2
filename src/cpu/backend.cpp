// The CPU's row of the backend table.
#include "stages/backend.h"

#include "cpu/bookkeeping.h"

namespace scope {

namespace {

template <auto kStage, class Args>
void each_head(const Exec& exec, std::span<const Args> heads) {
  for (const Args& head : heads) kStage(exec, head);
}

constexpr Backend kCpu = {
    .name = "cpu",
    .group = each_head<cpu::group, GroupArgs>,
    .encode = each_head<cpu::encode, EncodeArgs>,
    .score = each_head<cpu::score, ScoreArgs>,
    .select = each_head<cpu::select, SelectArgs>,
    .attend = each_head<cpu::attend, AttendArgs>,
    .group_scratch = cpu::group_scratch,
    .encode_scratch = cpu::encode_scratch,
    .select_scratch = cpu::select_scratch,
    .attend_scratch = cpu::attend_scratch,
    .describe = cpu::describe,
    .finish = cpu::finish,
    .import_selection = cpu::import_selection,
    .set_slot = cpu::set_slot,
    .fill = cpu::fill,
    .copy = cpu::copy,
    .convert = cpu::convert,
    .scatter = cpu::scatter,
    .enter = nullptr,
    .leave = nullptr,
    .check_slot = nullptr,
    .mark = nullptr,
    .times = nullptr,
    .read = nullptr,
    .write = nullptr,
    .cocluster = each_head<cpu::cocluster, CoclusterArgs>,
    .cocluster_scratch = cpu::cocluster_scratch,
    .compensate = each_head<cpu::compensate, CompensateArgs>,
    .compensate_scratch = cpu::compensate_scratch,
};

}  // namespace

const Backend* cpu_backend() { return &kCpu; }

}  // namespace scope
