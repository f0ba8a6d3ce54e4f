#include "zero/engine/op_executor.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <vector>

namespace ballast {
namespace {

std::string text(const OffPlanPosition& position, const Model& model) {
  if (position[1] == 0) return "calls step()";
  return fmt::format("uses unit {} in {}", model.units[static_cast<std::size_t>(position[1] - 1)].name,
                     name(static_cast<Phase>(position[2])));
}

}  // namespace

// If only one rank is off plan, it makes another call here than the others, which communicators refuse.
void rendezvous(const Op& op, const OffPlanPosition& position, Mesh& mesh, const Model& model) {
  constexpr std::size_t words = std::tuple_size_v<OffPlanPosition>;
  Communicator& shards = op.lane == Lane::gather ? *mesh.gather : *mesh.reduce;
  Communicator& group = op.ranks == Ranks::shard_group ? shards : *mesh.replicas;
  std::vector<std::int64_t> positions(words * group.size());
  std::ranges::copy(position, positions.begin() + static_cast<std::ptrdiff_t>(words * group.rank()));
  try {
    group.all_reduce(positions, Purpose::off_plan);
  } catch (const Error& error) {
    if (error.code() != Code::wrong_size) throw;
    Problem problem = error.problem();
    problem.what =
        fmt::format("only this rank leaves the program's order, as it {}: {}", text(position, model), problem.what);
    fail(Code::out_of_order, problem);
  }
  for (std::size_t rank = 0; rank < group.size(); ++rank) {
    OffPlanPosition theirs{};
    std::copy_n(positions.begin() + static_cast<std::ptrdiff_t>(words * rank), words, theirs.begin());
    require(theirs == position, Code::out_of_order, [&] {
      return Problem{
          .what = fmt::format("rank {} of the group {} after {} uses in this step, but this rank {} after {}", rank,
                              text(theirs, model), theirs[0], text(position, model), position[0]),
          .needed = "the same uses in the same order on all ranks"};
    });
  }
}

}  // namespace ballast
