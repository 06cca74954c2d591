// A few tokens: columns of x are looked up in registers, 16 rows at a time.
// RUN: gossamer-opt %s -p 'expose-storage,lower-lookup,canonicalize,cse' --split-input-file | filecheck %s

// x is copied, with a block of zeros after its last block; K = 30 is two blocks of 16.
// CHECK:       module attributes {kernel.workspace = 384 : index}
// CHECK-LABEL: func.func private @region_rows2(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x30xf32>, %[[BOUNDS:[a-z0-9]*]]: memref<?xi32>, %[[ORIGINS:[a-z0-9]*]]: memref<?xi32>, %[[PLACES:[a-z0-9]*]]: memref<?xi8>, %[[VAL:[a-z0-9]*]]: memref<?xf32>, %[[BIAS:[a-z0-9]*]]: memref<7xf32>, %[[OUT:[a-z0-9]*]]: memref<?x7xf32>,
// CHECK:         %[[COPY:.*]] = memref.view %{{.*}} : memref<?xi8> to memref<2x48xf32>
// CHECK:         vector.maskedload %[[X]]
// CHECK:         vector.store %{{.*}}, %[[COPY]][%c1, %c32]

// Runs of three steps, then runs of two: the window's two blocks of each token are loaded once for a run.
// CHECK:         scf.for %[[AN:[a-z0-9]*]] = %{{.*}} iter_args(%[[AT:[a-z0-9]*]] = %{{.*}}) -> (index, vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>) {
// CHECK:           memref.load %[[ORIGINS]][%[[AN]]]
// CHECK-COUNT-4:   vector.load %[[COPY]]
// CHECK:           vector.load %[[VAL]][%[[AT]]]
// CHECK:           %[[P:.*]] = vector.load %[[PLACES]][%[[AT]]]
// CHECK:           %[[USED:.*]] = arith.cmpi slt, %[[P]]
// CHECK:           %[[WHERE:.*]] = arith.extui %[[P]] : vector<16xi8> to vector<16xi32>
// CHECK:           %[[FOUND:.*]] = llvm.call_intrinsic "llvm.x86.avx512.vpermi2var.ps.512"(%{{.*}}, %[[WHERE]], %{{.*}})
// CHECK:           %[[OR_ZERO:.*]] = arith.select %[[USED]], %[[FOUND]]
// CHECK:           vector.fma %{{.*}}, %[[OR_ZERO]]
// CHECK-COUNT-5:   vector.fma
// CHECK:           scf.yield
// CHECK:         scf.for
// CHECK-COUNT-4:   vector.fma
// CHECK:           scf.yield

// The sums are 16 rows' already.
// CHECK:         vector.maskedload %[[BIAS]]
// CHECK:         vector.maskedstore %[[OUT]]
// CHECK-LABEL: func.func private @region_rows1(
// CHECK-LABEL: func.func @region(
// CHECK:         scf.parallel
// CHECK:           scf.for
// CHECK:             call @region_rows2
// CHECK:             call @region_rows1
func.func @region(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, "windows(reduction=1, lanes=16)">, %bias: tensor<7xf32>) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<7xf32>) -> f32
    %0 = arith.addf %sum, %b : f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "lookup", tile = [2]} : (tensor<?x30xf32>, tensor<7x30xf32, "windows(reduction=1, lanes=16)">) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}

// -----

// Vectors of 256 bits: each block is permuted, and the place's bit 3 says which of the two it is in.
// CHECK-LABEL: func.func private @narrow_rows1(
// CHECK:         %[[LOW:.*]] = llvm.call_intrinsic "llvm.x86.avx2.permps"
// CHECK:         %[[HIGH:.*]] = llvm.call_intrinsic "llvm.x86.avx2.permps"
// CHECK:         %[[BIT:.*]] = arith.andi
// CHECK:         %[[IN_LOW:.*]] = arith.cmpi eq, %[[BIT]]
// CHECK:         arith.select %[[IN_LOW]], %[[LOW]], %[[HIGH]]
func.func @narrow(%x: tensor<?x30xbf16>, %w: tensor<7x30xbf16, "windows(reduction=1, lanes=8)">) -> tensor<?x7xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "lookup", tile = [1]} : (tensor<?x30xbf16>, tensor<7x30xbf16, "windows(reduction=1, lanes=8)">) -> tensor<?x7xbf16>
  return %y : tensor<?x7xbf16>
}
