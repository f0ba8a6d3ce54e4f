#include "offload/scratch_places.h"

#include "offload/drive_space.h"

namespace ballast::offload {

std::uint64_t ScratchPlaces::take() {
  if (!free_.empty() && free_.front().last_write.is_done()) {
    const std::uint64_t offset = free_.front().offset;
    free_.pop_front();
    return offset;
  }
  require_allowed((count_ + 1) * place_bytes_, directory_);
  return count_++ * place_bytes_;
}

}  // namespace ballast::offload
