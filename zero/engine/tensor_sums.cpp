#include "zero/engine/tensor_sums.h"

#include <algorithm>

namespace ballast {

std::vector<TensorSums::Part> TensorSums::parts_of(const std::vector<LastingNorm>& norms) const {
  const std::vector<Unit>& units = plan_.model().units;
  std::vector<std::size_t> begins(units.size() + 1);  // of each unit's tensors
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    begins[unit + 1] = begins[unit] + units[unit].tensors.size();
  }
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

  std::size_t tensors = 0;
  for (const Unit& unit : plan_.model().units)
    tensors += unit.tensors.size();
  std::vector<kernels::ExactSum> of_tensors(tensors);
  for (std::size_t i = 0; i < parts.size(); ++i)
    kernels::merge(of_tensors[parts[i].tensor], sums[i]);
  return of_tensors;
}

}  // namespace ballast
