// An erf that may be an approximation, and is added to 1, is a quadratic polynomial of 16 pieces, which registers hold.
// RUN: gossamer-opt %s -p 'expand-math,canonicalize' --split-input-file | filecheck %s --check-prefixes=CHECK,WIDE
// RUN: gossamer-opt %s -p 'expand-math{bits=256},canonicalize' --split-input-file | filecheck %s --check-prefixes=CHECK,NARROW

// CHECK-LABEL: func.func @normal(
// WIDE:          %[[SIZE:.*]] = math.absf %arg0
// WIDE:          %[[ROUNDED:.*]] = vector.fma
// WIDE:          %[[PIECE:.*]] = vector.bitcast %[[ROUNDED]] : vector<16xf32> to vector<16xi32>
// WIDE-COUNT-3:  llvm.call_intrinsic "llvm.x86.avx512.permvar.sf.512"(%{{.*}}, %[[PIECE]])
// WIDE-COUNT-2:  vector.fma
// WIDE:          math.copysign %{{.*}}, %arg0
// NARROW:        arith.divf
// CHECK-NOT:     math.erf
func.func @normal(%x: vector<16xf32>) -> vector<16xf32> {
  %one = arith.constant dense<1.0> : vector<16xf32>
  %0 = math.erf %x fastmath<afn> : vector<16xf32>
  %1 = arith.addf %0, %one : vector<16xf32>
  return %1 : vector<16xf32>
}

// -----

// As in GELU: a factor of its argument is taken with the one of the pieces, and x (erf + 1) is x erf + x.
// WIDE-LABEL:    func.func @gelu(
// WIDE-SAME:       %[[X:.*]]: vector<16xf32>
// WIDE:            %[[HALF:.*]] = arith.mulf %[[X]]
// WIDE:            math.absf %[[X]]
// WIDE:            %[[ERF:.*]] = math.copysign %{{.*}}, %[[X]]
// WIDE:            vector.fma %[[HALF]], %[[ERF]], %[[HALF]]
func.func @gelu(%x: vector<16xf32>) -> vector<16xf32> {
  %one = arith.constant dense<1.0> : vector<16xf32>
  %half = arith.constant dense<0.5> : vector<16xf32>
  %root = arith.constant dense<0.70710677> : vector<16xf32>
  %h = arith.mulf %x, %half : vector<16xf32>
  %u = arith.mulf %x, %root : vector<16xf32>
  %0 = math.erf %u fastmath<afn> : vector<16xf32>
  %1 = arith.addf %0, %one : vector<16xf32>
  %2 = arith.mulf %h, %1 : vector<16xf32>
  return %2 : vector<16xf32>
}
