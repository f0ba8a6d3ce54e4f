// A tile's master and moments as plain values in host memory, for callers that inspect or replace them.
#pragma once

#include <span>

#include "kernels/backend.h"

namespace ballast::kernels {

// Throws B1001 if the tile stores no such moment. `values` has one element for each of the tile's.
void read_moment(const TileMemory& tile, Moment moment, std::span<float> values);
void write_moment(const TileMemory& tile, Moment moment, std::span<const float> values);  // rounded to the nearest

// Sets the master to the parameter.
void begin_master(const TileMemory& tile, Backend& backend);

// Copies the state to another tile of as many elements: bit by bit where both store it in the same format, else through
// fp32 and rounded to the nearest. A tile without a master is frozen, if its parameter is not the master; a moment that
// `from` lacks becomes zero, and so does a value of the trainer's own.
void copy_state(const TileMemory& from, const TileMemory& to);

// Copies the parameter and its master in the same way. Everything else of `to` stays.
void copy_parameter(const TileMemory& from, const TileMemory& to);

}  // namespace ballast::kernels
