/* SPDX-License-Identifier: Apache-2.0
 *
 * The mailbox with two ranks, written independently of nvcomm/reference/: a second opinion. docs/model.md has the
 * commands and what came out.
 *
 *   SLOTS   slots                                SIZES   words each rank sends, call by call: "1,2,1,1"
 *   CALLS   calls                                WORDS   the largest of them (1 or 2)
 *   OWN     1: the own row is collected (R2)     PACKED  1: rows are packed by the call's size (R3 off)
 *   CLEAR   0: what was collected, at once (R3); 1: the call before, between publish and collect;
 *           2: the call before, after collect
 *   LANDED  1: a call's clears have landed before the rank goes on (R1)
 *
 * A store in flight is a bit in `flight[cell]`: bit 0 is EMPTY, bit v is value v. One process per cell lands them in any
 * order. Value of a word: 1 + 2 * call + source.
 */
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef WORDS
#define WORDS 1
#endif
#ifndef CALLS
#define CALLS 4
#endif
#ifndef OWN
#define OWN 1
#endif
#ifndef PACKED
#define PACKED 0
#endif
#ifndef CLEAR
#define CLEAR 0
#endif
#ifndef LANDED
#define LANDED 1
#endif
#ifndef SIZES
#define SIZES 1,1,1,1,1,1
#endif

#define ROW (2 * WORDS)
#define BOX (SLOTS * ROW)
#define CELL(dst, slot, src, n, w) ((dst) * BOX + (slot) * ROW + (PACKED -> (src) * (n) : (src) * WORDS) + (w))
#define VALUE(call, src) (1 + 2 * (call) + (src))
#define BIT(src, w) (1 << (2 * (src) + (w)))

byte size[6] = {SIZES};
byte memory[2 * BOX];
short flight[2 * BOX]; /* at most 15 values: 7 calls */

byte clears[2]; /* EMPTY stores in flight, by rank; two to one cell are one */

inline clear() {
    if
    :: !(flight[c] & 1) -> flight[c] = flight[c] | 1; clears[me]++
    :: else
    fi
}

proctype Cell(byte c) {
    byte v;
end:
    do
    :: atomic { flight[c] != 0 ->
           if
           :: (flight[c] & 1) -> v = 0
           :: (flight[c] & 2) -> v = 1
           :: (flight[c] & 4) -> v = 2
           :: (flight[c] & 8) -> v = 3
           :: (flight[c] & 16) -> v = 4
           :: (flight[c] & 32) -> v = 5
           :: (flight[c] & 64) -> v = 6
           :: (flight[c] & 128) -> v = 7
           :: (flight[c] & 256) -> v = 8
           :: (flight[c] & 512) -> v = 9
           :: (flight[c] & 1024) -> v = 10
           :: (flight[c] & 2048) -> v = 11
           :: (flight[c] & 4096) -> v = 12
           fi;
           flight[c] = flight[c] & ~(1 << v);
           memory[c] = v;
           if
           :: v == 0 -> clears[c / BOX]--
           :: else
           fi;
           v = 0 }
    od
}

inline take(src, w) {
    c = CELL(me, slot, src, size[call], w);
    assert(memory[c] == VALUE(call, src)); /* STALE */
    if
    :: CLEAR == 0 -> clear()
    :: else
    fi;
    pending = pending & ~BIT(src, w);
    c = 0
}

#define SEEN(src, w) ((pending & BIT(src, w)) && memory[CELL(me, slot, src, size[call], w)] != 0)

inline clear_previous() {
    if
    :: call > 0 ->
        s = 0;
        do
        :: s < 2 ->
            w = 0;
            do
            :: w < size[call - 1] ->
                c = CELL(me, (slot + SLOTS - 1) % SLOTS, s, size[call - 1], w);
                clear();
                w++
            :: else -> break
            od;
            s++
        :: else -> break
        od
    :: else
    fi;
    s = 0; w = 0; c = 0
}

inline publish() {
    s = 0;
    do
    :: s < 2 ->
        w = 0;
        do
        :: w < size[call] ->
            c = CELL(s, slot, me, size[call], w);
            flight[c] = flight[c] | (1 << VALUE(call, me));
            if
            :: OWN || s != me -> pending = pending | BIT(s, w)
            :: else
            fi;
            w++
        :: else -> break
        od;
        s++
    :: else -> break
    od;
    s = 0; w = 0; c = 0
}

proctype Rank(byte me) {
    byte call, slot, pending, s, w, c;
    do
    :: call < CALLS ->
        atomic {
            publish();
            if
            :: CLEAR == 1 -> clear_previous()
            :: else
            fi
        }
        do
        :: atomic { SEEN(0, 0) -> take(0, 0) }
        :: atomic { SEEN(1, 0) -> take(1, 0) }
        :: atomic { SEEN(0, 1) -> take(0, 1) }
        :: atomic { SEEN(1, 1) -> take(1, 1) }
        :: atomic { pending == 0 ->
               if
               :: CLEAR == 2 -> clear_previous()
               :: else
               fi;
               break }
        od;
        atomic { (!LANDED || clears[me] == 0) -> call++; slot = (slot + 1) % SLOTS }
    :: call == CALLS -> break
    od
}

init {
    atomic {
        byte i;
        do
        :: i < 2 * BOX -> run Cell(i); i++
        :: else -> break
        od;
        run Rank(0);
        run Rank(1)
    }
}
