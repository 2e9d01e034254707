// An interpreter of the gfx11 and gfx12 instructions that a compiler's listing has, wave by wave, with what a card would
// not say: registers that nobody wrote or that are used before their load was waited for, races in LDS, addresses outside
// of every array, barriers that not all waves reach. Not modelled: time, caches, and the hazards between instructions
// that the assembler fills (s_nop, s_wait_alu, s_waitcnt_depctr).
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "layout.h"
#include "numbers.h"
#include "wave.h"
#include "vector.h"
#include "matrix.h"
#include "memory.h"
#include "flow.h"
#include "blocks.h"
