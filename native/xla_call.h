// One collective of a program that XLA compiled: from its buffers to the engine and back. Must not
// know which framework the program is from.
#pragma once

#include "core/door.h"
#include "native/xla_ffi.h"

namespace horovod::xla {

// Answers one call of a handler: N operands and a token give N results and a token. Blocks the
// calling thread, which drives the engine: XLA on processors waits for its handlers anyway, those
// that end later included. The tokens are scalars whose values mean nothing; a program that passes
// them from call to call makes its calls in this order.
//
// What the call is comes in attributes, as numbers (int64) `kind`, `set`, `op`, `root`,
// `prescale_bits` and `postscale_bits`, the bits of doubles, and texts `operator`, which error
// messages start with, `name` and `site`.
//
// `door` may be null: horovod was never initialized.
Error* run_collective(Frame* frame, Door* door) noexcept;

}  // namespace horovod::xla
