#include "zero/engine/tensor_sums.h"

#include <algorithm>

namespace ballast {

std::vector<LastingNorm> lasting_norms(const std::vector<Op>& list) {
  const auto agree = std::ranges::find(list, OpKind::agree, &Op::kind);
  std::vector<LastingNorm> norms;
  for (const Op& op : list) {
    if (op.kind != OpKind::norm) continue;
    LastingNorm& found = norms.emplace_back(LastingNorm{op});
    const auto download = std::ranges::find_if(
        list, [&](const Op& d) { return d.kind == OpKind::download && d.unit == op.unit && d.tile == none; });
    if (download == list.end() || download->from != op.from) continue;
    found.download = static_cast<std::size_t>(download - list.begin());
    found.norm.lane = Lane::host;
    found.norm.from = download->to;
    found.norm.to = agree->state;
  }
  return norms;
}

std::vector<std::size_t> TensorSums::begins() const {
  std::vector<std::size_t> begins{0};
  for (const Unit& unit : plan_.model().units)
    begins.push_back(begins.back() + unit.tensors.size());
  return begins;
}

std::vector<TensorSums::Part> TensorSums::parts_of(const std::vector<LastingNorm>& norms) const {
  const std::vector<Unit>& units = plan_.model().units;
  const std::vector<std::size_t> begins = this->begins();
  std::vector<Part> parts;
  for (const auto& [op, download] : norms) {
    const UnitLayout& layout = plan_.layout().units[op.unit];
    for (const TensorPart& part : tensors_in(units[op.unit], layout, layout.trained, plan_.input().rank_in_shard_group,
                                             {0, layout.trained.shard})) {
      parts.push_back({&op, begins[op.unit] + part.tensor, {part.in_shard, part.range.count}});
    }
  }
  return parts;
}

std::span<kernels::ExactSum> TensorSums::host_memory(std::size_t sums) {
  const std::size_t bytes = sums * sizeof(kernels::ExactSum);
  if (host_.bytes() < bytes) {
    host_ = allocate(accounts_, {.kind = gpu_ ? MemoryKind::pinned : MemoryKind::pageable,
                                 .bytes = bytes,
                                 .owner = "norms of tensors",
                                 .gpu = gpu_.value_or(0)});
  }
  return {reinterpret_cast<kernels::ExactSum*>(host_.data()), sums};
}

std::vector<kernels::ExactSum> TensorSums::of(const std::vector<Op>& list) {
  const std::vector<LastingNorm> norms = lasting_norms(list);
  const std::vector<Part> parts = parts_of(norms);
  std::vector<const Op*> users;  // one operation for each sum in whose memory others are computed
  for (const Part& part : parts) {
    if (std::ranges::none_of(users, [&](const Op* user) { return user->to.slot == part.norm->to.slot; })) {
      users.push_back(part.norm);
    }
  }
  const std::span<kernels::ExactSum> memory = host_memory(users.size() + parts.size());
  const auto saved = memory.first(users.size()), sums = memory.subspan(users.size());
  const auto of = [&](const Op& op) -> const Arithmetic& { return arithmetic_.of(op.lane); };
  for (std::size_t i = 0; i < users.size(); ++i)
    of(*users[i]).save_sum(users[i]->to, &saved[i]);
  for (std::size_t i = 0; i < parts.size(); ++i)
    of(*parts[i].norm).squares_of(*parts[i].norm, parts[i].range, &sums[i]);
  for (std::size_t i = 0; i < users.size(); ++i)
    of(*users[i]).restore_sum(users[i]->to, &saved[i]);
  for (const Op* user : users)
    of(*user).context().finish();

  std::vector<kernels::ExactSum> of_tensors(begins().back());
  for (std::size_t i = 0; i < parts.size(); ++i)
    kernels::merge(of_tensors[parts[i].tensor], sums[i]);
  return of_tensors;
}

void TensorSums::visit(const std::vector<Op>& list, const Op& agree, const Slots& slots, const GradientVisitor& visit) {
  const std::vector<LastingNorm> norms = lasting_norms(list);
  const std::vector<std::size_t> begins = this->begins();
  for (const Part& part : parts_of(norms)) {
    const Op& norm = *part.norm;
    const View gradients = slots.view(norm.from, plan_.input().dtype_of_sums(norm.unit));
    visit(norm.unit, part.tensor - begins[norm.unit], gradients.part(part.range.first, part.range.count),
          slots.on_gpu(norm.from));
  }
  const auto of = [&](Lane lane) -> const Arithmetic& { return arithmetic_.of(lane); };
  if (agree.to.exists()) of(agree.lane).take_sum(agree.to);
  if (agree.state.exists()) of(Lane::host).take_sum(agree.state);
  for (const LastingNorm& each : norms)
    of(each.norm.lane).add_squares(each.norm);
  for (const LastingNorm& each : norms)
    of(each.norm.lane).context().finish();
}

}  // namespace ballast
