#include "zero/engine/matrix_executor.h"

namespace ballast {

MatrixExecutor::MatrixExecutor(const CompiledPlan& plan, Mesh& mesh, const Slots& slots, const GpuLanes* gpu,
                               int threads)
    : plan_(plan),
      mesh_(mesh),
      slots_(slots),
      rank_of_shard_(plan.placement().shards),
      homes_(home_matrices(plan.model(), plan.layout())),
      orthogonalizer_(gpu == nullptr ? kernels::cpu_orthogonalizer({.threads = threads})
                                     : kernels::cuda_orthogonalizer(gpu->stream(Lane::update).handle(), gpu->gpu())) {
  for (std::size_t rank = 0; rank < rank_of_shard_.size(); ++rank)
    rank_of_shard_[shard_of(plan.placement(), rank)] = rank;
  for (std::size_t unit = 0; unit < homes_.size(); ++unit) {
    parts_.push_back(
        parts_of(plan.model().units[unit], plan.layout().units[unit], homes_[unit], plan.input().rank_in_shard_group));
  }
}

View MatrixExecutor::values(const Piece& piece, std::size_t begin, std::size_t count) const {
  return slots_.view(piece, DType::bf16).part(begin, count);
}

template <class Part>
std::vector<Part> MatrixExecutor::parts(const std::vector<MatrixPart>& of, const Piece& piece) const {
  std::vector<Part> parts;
  parts.reserve(of.size());
  for (const auto& [shard, begin, count] : of)
    parts.push_back({rank_of_shard_[shard], values(piece, begin, count)});
  return parts;
}

void MatrixExecutor::collect(const Op& op) const {
  const auto& [in_shard, in_matrices] = parts_[op.unit];
  mesh_.matrices->exchange(parts<SentPart>(in_shard, op.from), parts<ReceivedPart>(in_matrices, op.to));
}

void MatrixExecutor::distribute(const Op& op) const {
  const auto& [in_shard, in_matrices] = parts_[op.unit];
  mesh_.matrices->exchange(parts<SentPart>(in_matrices, op.from), parts<ReceivedPart>(in_shard, op.to));
}

// One call for the blocks of a matrix that have one shape: a batch of several matrices would depend on the number of ranks, and
// a GPU's bits may depend on the batch.
void MatrixExecutor::orthogonalize(const Op& op, const StepNumbers& step) const {
  const View workspace = slots_.view(op.state, DType::u8);
  for (const auto& [tensor, home, begin] : homes_[op.unit].matrices) {
    if (home != plan_.input().rank_in_shard_group || step.leaves_out(op.unit, tensor)) continue;
    const Tensor& matrix = plan_.model().units[op.unit].tensors[tensor];
    for (const auto& [first, shape] : blocks_of(matrix)) {
      (*orthogonalizer_)(values(op.to, begin + first, shape.elements()), shape, step.orthogonalizations[matrix.group],
                         workspace);
    }
  }
}

}  // namespace ballast
