"""Operations on SparseTensors in a graph: folds and fuses them, and puts products in the cheaper order."""
