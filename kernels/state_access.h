// A tile's master and moments as plain numbers, for who looks at them or brings them from elsewhere. In host memory.
#pragma once

#include <span>

#include "kernels/backend.h"

namespace ballast::kernels {

enum class Moment : std::uint8_t { momentum, variance };

// Throws B1001 where the rule keeps no such moment. `numbers` has an element for each of the tile's.
void read_moment(const UpdateTile& tile, Moment moment, std::span<float> numbers);
void write_moment(const UpdateTile& tile, Moment moment, std::span<const float> numbers);  // rounded to the nearest

// The master becomes what the parameter is.
void begin_master(const UpdateTile& tile, Backend& backend);

// The same numbers in another tile of as many elements: bit by bit where both are kept alike, else through fp32 and
// rounded to the nearest. A tile without a master is frozen, if its parameter is not the master; a moment that `from`
// lacks becomes zero.
void copy_state(const UpdateTile& from, const UpdateTile& to);

}  // namespace ballast::kernels
