// The state of a training by tensor instead of by tile: what checkpoints, and moves between trainings, read and write.
#pragma once

#include <ballast/local_state.h>
#include <ballast/training_state.h>

#include <cstddef>
#include <functional>
#include <set>
#include <utility>
#include <vector>

namespace ballast {

// Use it between steps. All ranks call the functions that change state or read it from drives together; TrainingState::change()
// says what holds if one fails. The training outlives this object.
class TensorState {
 public:
  using Visitor = std::function<void(const StatePart& part)>;
  // Sees the parts of a tile without their memory, each with its first element in the tile, and LocalTile::record.
  using Filter = std::function<bool(const std::vector<std::pair<StatePart, std::size_t>>& parts,
                                    const offload::OpenRecord* record)>;
  // Writes a range of a tensor's parameters into host memory, in the unit's format; false: the parameters stay.
  using ParameterWriter = std::function<bool(std::size_t unit, std::size_t tensor, Range range, std::byte* into)>;
  // A moment of the full tensor, in fp32 and host memory; null: the moment stays.
  using MomentSource = std::function<const float*(std::size_t unit, std::size_t tensor, Moment moment)>;
  using TensorSet = std::set<std::pair<std::size_t, std::size_t>>;  // unit and tensor

  explicit TensorState(Training& training) : training_(training), tiles_(training) {}

  std::vector<Range> local_ranges(std::size_t unit, std::size_t tensor) const;  // elements of the tensor
  ChunkKind chunk_kind(std::size_t unit) const;                                 // the kind of its trained tensors
  std::vector<StatePart> parts() const;  // listed in the order of visits; without their memory
  void visit(const Visitor& visitor, const Filter& which = {});
  void change(const Visitor& visitor, const std::function<void()>& agree);

  // Writes the moment of this rank's elements into `into`, which has the size of the full tensor; its other elements stay.
  void read_moment(std::size_t unit, std::size_t tensor, Moment moment, float* into);
  void write_moments(const MomentSource& source);

  // Sets the masters of written parameters to them.
  void write_parameters(const ParameterWriter& writer);
  // The same, where the caller wrote to full parameters of these tensors.
  void take_full_parameters(const TensorSet& written);

 private:
  template <class Visit>
  void each_part(const LocalTile& tile, Visit&& visit) const;
  std::size_t rank() const;  // number in its shard group

  Training& training_;
  TrainingState tiles_;
};

}  // namespace ballast
